"""The reference of the control plane: uvloop, MessagePack, and nothing else.

python -m kvtierd.bench.echo_server SOCKET
"""

import asyncio
import struct
import sys
from typing import cast

import msgpack
import uvloop


class Echo(asyncio.Protocol):
    """Unpacks each message, packs it again and sends it back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what answers are written to."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer one message."""
        message = msgpack.unpackb(data[4:])
        body = msgpack.packb(message)
        self.transport.write(struct.pack("<I", len(body)) + body)


async def serve(path: str) -> None:
    """Serve until this process is ended."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
