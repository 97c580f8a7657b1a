"""Quantities as people write them in the configuration: sizes, durations and user ids."""

import math
import os
import re
from typing import Self

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
SIZE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Size(int):
    """A number of bytes, written as a whole number or as text such as "64MiB".

    Units: bytes.
    """

    expected = 'a size such as 67108864 or "64MiB"'

    @classmethod
    def parse(cls, value: object) -> Self:
        """Reads a number of bytes from the file's value. Errors: `ValueError`, bare."""
        if isinstance(value, int) and not isinstance(value, bool):
            size = cls(value)
        else:
            number, unit = _number_and_unit(value)
            exact = number * SIZE_UNITS.get(unit, math.nan)
            if not math.isfinite(exact) or exact != int(exact):
                raise ValueError
            size = cls(exact)
        if not 0 <= size < 2**63:
            raise ValueError
        return size


class Seconds(float):
    """A length of time, written as a number of seconds or as text such as "30s" or "10m".

    Units: seconds; the word "never" is infinity, where a key allows it.
    """

    expected = 'a duration such as 30 or "30s"'

    @classmethod
    def parse(cls, value: object) -> Self:
        """Reads a length of time from the file's value. Errors: `ValueError`, bare."""
        if value == "never":
            return cls(math.inf)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value)
        else:
            number, unit = _number_and_unit(value)
            seconds = number * DURATION_UNITS.get(unit, math.nan)
        if not 0 <= seconds < math.inf:
            raise ValueError
        return cls(seconds)


class Uid(int):
    """A user id; the word "self" is the uid the daemon runs as."""

    expected = 'a user id such as 1000, or "self"'

    @classmethod
    def parse(cls, value: object) -> Self:
        """Reads a user id from the file's value. Errors: `ValueError`, bare."""
        if value == "self":
            return cls(os.geteuid())
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32 - 1:
            raise ValueError
        return cls(value)


def _number_and_unit(value: object) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    return float(match[1]), match[2]
