"""How an error becomes one line for people, one object for programs, and an exit code."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from kvtier_client.errors import KvtierError, RequestError
from kvtierd.tiers.errors import StartError

if TYPE_CHECKING:
    from kvtierd.config import ConfigError


class ReportedError(click.ClickException):
    """An error whose exit code is that of the taxonomy."""

    def __init__(self, error: "KvtierError | ConfigError", as_json: bool) -> None:
        super().__init__(" ".join(str(error).split()))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance
        self._name = type(error).__name__
        self._as_json = as_json

    def show(self, file: IO[Any] | None = None) -> None:
        """One line on stderr."""
        out = sys.stderr if file is None else file
        if self._as_json:
            error = {"error": self._name, "exit_code": self.exit_code, "message": self.message}
            print(json.dumps(error), file=out)
        else:
            print(f"kvtierctl: {self._name}: {self.message}", file=out)


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn the errors of kvtierd into `ReportedError`."""
    try:
        yield
    except KvtierError as error:
        raise ReportedError(error, as_json) from error
    except StartError as error:
        # Files that cannot be used as asked: locked by a daemon, somebody else's, not there.
        raise ReportedError(RequestError(str(error)), as_json) from error
    except ValueError as error:
        from kvtierd.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        raise ReportedError(error, as_json) from error
