"""torch.save and torch.load with files on tmpfs: what a few lines of a script would do."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tests.bench.peers.adapters.peer import Bytes, Peer, Setup, serve


class TorchFile(Peer):
    """A file for each call, with a list of tensors; loading copies into the tensors that are there.

    Files are mapped while they are loaded, so that loading does not copy twice.
    """

    version = torch.__version__

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.written: set[str] = set()

    def path(self, first: int) -> str:
        """The file of the call that begins with this block."""
        return os.path.join(self.directory, f"{first}.pt")

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        path = self.path(first)
        torch.save([torch.from_numpy(block) for block in blocks], path)
        self.written.add(path)

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        loaded = torch.load(self.path(first), mmap=True, weights_only=True)
        for block, tensor in zip(blocks, loaded, strict=True):
            torch.from_numpy(block).copy_(tensor)

    def end(self) -> None:
        for path in self.written:
            os.unlink(path)
        self.written.clear()


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """No server."""
    yield TorchFile(setup.shm)


if __name__ == "__main__":
    serve(start)
