"""Runs the kernels on the CPU: their sources, built by g++ on an emulated launch grid."""

import ctypes
from enum import Enum
from pathlib import Path

import torch

from kvtier_kernels.plans import Launch, Plan


class Outcome(Enum):
    """How a launch ended."""

    DONE = 0
    TRAPPED = 1
    DEADLOCKED = 2


class Emulator:
    """The emulated grid; a block's threads take turns forwards, or backwards."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        grid = [ctypes.c_uint] * 4
        self._emulate = loaded.emulate
        self._emulate.argtypes = [ctypes.c_char_p, *grid, ctypes.c_bool, ctypes.c_void_p]
        self._constant = loaded.constant
        self._constant.argtypes = [ctypes.c_char_p]
        self._constant.restype = ctypes.c_longlong

    def launch(self, launch: Launch, backwards: bool = False) -> Outcome:
        """Runs one kernel."""
        words = torch.tensor(launch.arguments, dtype=torch.int64)
        name = launch.kernel.encode()
        outcome = self._emulate(name, *launch.grid, launch.threads, backwards, words.data_ptr())
        return Outcome(outcome)

    def carry_out(self, plan: Plan, backwards: bool = False) -> Outcome:
        """Runs a plan's launches in order, up to the first that does not end well."""
        for launch in plan.launches:
            outcome = self.launch(launch, backwards)
            if outcome is not Outcome.DONE:
                return outcome
        return Outcome.DONE

    def constant(self, name: str) -> int:
        """A constant of the sources, by its name in Python."""
        return int(self._constant(name.encode()))
