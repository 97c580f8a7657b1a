"""Seeds of random tests: a run of all tests does the same each time, a long run something new."""

import os
import random


def drawn_seed(count: str) -> int:
    """A seed, told in the test's output; a new one where the variable of this name asks for more.

    So what fails a run of all tests is what was changed, and long runs find what nobody thought of.
    """
    seed = random.randrange(1 << 32) if count in os.environ else 1
    print(f"seed {seed}")
    return seed
