"""A client process under a test's control: it can be stopped, killed, and be somebody else.

The test's side sends method calls of `RawClient` through a pipe; the process answers them.
"""

import os
import signal
import struct
import subprocess
import sys
from typing import Any, BinaryIO

import msgpack

from tests.support.raw import RawClient

_LENGTH = struct.Struct("<I")


class Puppet:
    """The test's side. Attributes that it does not have are methods of the client."""

    def __init__(self, path: str, *, uid: int | None = None, hello: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.puppet"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid
        self.welcome: list[Any] = []
        try:
            self.do("connect", path, -1 if uid is None else uid)
            if hello:
                self.welcome = self.do("hello")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Puppet":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.do(method, *args)

    def do(self, method: str, *args: Any) -> Any:
        """Have the client do something. Errors: AssertionError when that failed there."""
        self.begin(method, *args)
        return self.end()

    def begin(self, method: str, *args: Any) -> None:
        """Start it and do not wait for it."""
        assert self._process.stdin is not None
        _write(self._process.stdin, [method, args])

    def end(self) -> Any:
        """What the earliest thing begun has led to."""
        assert self._process.stdout is not None
        good, value = _read(self._process.stdout)
        assert good, value
        return value

    def freeze(self) -> None:
        """SIGSTOP; when this returns it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, also of a stopped one; when this returns it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _write(pipe: BinaryIO | Any, value: Any) -> None:
    body = msgpack.packb(value)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> Any:
    head = pipe.read(_LENGTH.size)
    if not head:
        raise EOFError("the client process has ended")
    return msgpack.unpackb(pipe.read(_LENGTH.unpack(head)[0]), strict_map_key=False)


def main() -> None:
    """The process."""
    client: RawClient | None = None
    while True:
        try:
            method, args = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if client is None:
                path, uid = args
                if uid >= 0:
                    os.setuid(uid)
                client, value = RawClient(path), None
            else:
                value = getattr(client, method)(*args)
            answer = [True, value if method not in ("hello", "connect") else client.welcome]
        except Exception as error:
            answer = [False, f"{type(error).__name__}: {error}"]
        _write(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
