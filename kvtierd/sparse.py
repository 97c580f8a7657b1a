"""Arrays with room for all that could be, of which only what is used becomes memory."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sparse_zeros(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """`count` zeros that become memory page by page as they are written: never huge pages, of
    which one written element would make two megabytes."""
    memory = mmap.mmap(-1, max(count * np.dtype(dtype).itemsize, 1))
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count)
