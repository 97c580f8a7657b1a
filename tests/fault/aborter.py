"""Clients that die in the middle of what they do, many one after the other."""

import os
import random
import signal
import sys

from tests.fault.checker import KNOWN, LAYOUT
from tests.support.raw import HELD, RawClient, pattern, u32


def die_somewhere(path: str, seed: int) -> None:
    """A short life as a client; it ends by kill -9 after some of these steps."""
    steps = random.Random(seed).randint(1, 7)

    def step() -> None:
        nonlocal steps
        steps -= 1
        if not steps:
            os.kill(os.getpid(), signal.SIGKILL)

    client = RawClient(path)
    step()
    client.hello()
    step()
    session = client.open(LAYOUT)
    lease, slots = client.reserve(KNOWN, 4)
    client.write(slots[0], pattern(seed))
    step()
    client.ask("commit", lease, session, 0, u32(0), u32(0), u32(16), HELD)
    client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 1)
    step()
    client.send("reserve", client.lease(), KNOWN, 100, 0, 0, 30.0)
    step()
    client.ask("close_session", session)
    step()
    client.socket.sendall(b"\x40\0\0\0half a frame")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """`PATH COUNT SEED`."""
    path, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for number in range(count):
        child = os.fork()
        if not child:
            try:
                die_somewhere(path, seed + number)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"client {seed + number} has failed"


if __name__ == "__main__":
    main()
