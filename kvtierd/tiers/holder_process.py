"""The process that keeps the daemon's memfds alive while no daemon runs; a script of its own.

It is started by path with a bare interpreter, imports nothing of the project, and serves one
connection at a time: whoever is connected owns what is held, and the next one waits until it is
gone. Packets (SOCK_SEQPACKET): one byte of verb, then a name; descriptors travel beside them.

    H             hello: the connection is being served   → "ok"
    P name + fd   keep the descriptor under the name      → "ok"
    G             send everything                         → "=" name + fd, each; then "."
    D name        let go of one                           → "ok"
    S             let go of everything and end            → "ok"

Usage: holder_process.py SOCKET IDLE_SECONDS. It returns once the socket listens; the rest runs in
the background. Exit 3: another holder is there already. A holder whose socket's name is gone ends
by itself: what it holds cannot be asked for any more.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import sys

NAME_BYTES_MAX = 128
ITEMS_MAX = 256
FDS_PER_PACKET_MAX = 4
EXIT_TAKEN = 3
BACKLOG = 4


def listen(path: str) -> tuple[socket.socket, int]:
    """Become the one holder behind `path`; the lock lasts as long as the process."""
    lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        sys.exit(f"{path}.lock is not a regular file of uid {os.geteuid()}: move it away")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(EXIT_TAKEN)
    with contextlib.suppress(FileNotFoundError):  # of a holder that is dead, for we have its lock
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    listener.bind(path)
    os.umask(old)
    listener.listen(BACKLOG)
    return listener, lock


def go_to_background() -> None:
    """Leave the starter's session; the starter sees us end once the socket listens."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with contextlib.suppress(OSError):  # needs a privilege; without it we are small anyway
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, b"-900")
        finally:
            os.close(fd)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors; an empty packet is the end."""
    data, fds, flags, _ = socket.recv_fds(connection, NAME_BYTES_MAX + 2, FDS_PER_PACKET_MAX)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        return b"?", []
    return data, fds


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody needs here."""
    for fd in fds:
        os.close(fd)


def answer(connection: socket.socket, held: dict[bytes, int]) -> bool:
    """Serve one packet; False when the connection has ended."""
    packet, fds = receive(connection)
    if not packet:
        return False
    verb, name = packet[:1], packet[1:]
    if verb == b"P" and len(fds) == 1 and 0 < len(name) <= NAME_BYTES_MAX:
        if name not in held and len(held) >= ITEMS_MAX:
            close_all(fds)
            connection.send(b"too many are held")
            return True
        close_all([held[name]] if name in held else [])
        held[name] = fds[0]
        connection.send(b"ok")
        return True
    close_all(fds)
    if verb == b"G":
        for key, fd in held.items():
            socket.send_fds(connection, [b"=" + key], [fd])
        connection.send(b".")
    elif verb == b"D":
        close_all([held.pop(name)] if name in held else [])
        connection.send(b"ok")
    elif verb == b"S":
        close_all(list(held.values()))
        connection.send(b"ok")
        raise SystemExit
    else:
        connection.send(b"ok" if verb == b"H" else b"not understood")
    return True


def serve(connection: socket.socket, held: dict[bytes, int]) -> None:
    """Serve one owner until it is gone; a peer of another user is sent away."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("iII", credentials)[1] != os.geteuid():
        return
    try:
        while answer(connection, held):
            pass
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise


def inode(path: str) -> int:
    """What a name leads to; 0 when it leads nowhere."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def main() -> None:
    """Hold until told to stop, until idle with nothing held, or until nobody can reach us."""
    path, idle_s = sys.argv[1], float(sys.argv[2])
    listener, _lock = listen(path)
    ours = inode(path)
    go_to_background()
    held: dict[bytes, int] = {}
    try:
        while True:
            listener.settimeout(idle_s)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if not held or inode(path) != ours:  # the runtime directory was removed
                    return
                continue
            with connection:
                connection.settimeout(None)
                serve(connection, held)
    finally:
        if inode(path) == ours:
            with contextlib.suppress(OSError):
                os.unlink(path)


if __name__ == "__main__":
    main()
