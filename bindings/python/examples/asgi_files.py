"""Files from an ASGI application by sendfile: ``http.response.pathsend`` for uvicorn.

    python asgi_files.py DIRECTORY [PORT]

The server offers the extension ``http.response.pathsend`` of ASGI, which Starlette's
``FileResponse`` uses if it is there. The application sends a path instead of a body, and the server
sends the file without copying its bytes through Python.

uvicorn has no such extension, so this example adds it to uvicorn's protocol class for h11. TLS needs
the bytes in the program, so the extension is offered only without TLS.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http import h11_impl

from haul_io import aio


class FilePlaceholder:
    """Stands for the bytes of a file in h11, which only counts them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class PathSendCycle(h11_impl.RequestResponseCycle):
    """A request and its response, which may be a file."""

    def __init__(self, *, scope, transport, **others):
        if transport.get_extra_info("sslcontext") is None:
            scope.setdefault("extensions", {})["http.response.pathsend"] = {}
        super().__init__(scope=scope, transport=transport, **others)

    async def send(self, message):
        if message["type"] != "http.response.pathsend":
            return await super().send(message)
        if self.disconnected:
            return
        if self.scope["method"] != "HEAD":
            with open(message["path"], "rb") as file:
                await self._send_file(file)
        # uvicorn ends the response.
        await super().send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_file(self, file):
        length = os.fstat(file.fileno()).st_size
        # h11 checks the length against Content-Length, and returns what to send around the file.
        parts = self.conn.send_with_data_passthrough(h11.Data(data=FilePlaceholder(length)))
        place = next(i for i, part in enumerate(parts) if isinstance(part, FilePlaceholder))
        for part in parts[:place]:
            self.transport.write(part)
        # The head must leave the transport's buffer before the socket is used beside the transport.
        self.transport.set_write_buffer_limits(0)
        await self.flow.drain()
        while self.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        # A socket of its own, beside the transport.
        sock = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        sock.setblocking(False)
        sender = aio.Sender(sock)
        try:
            await sender.send_file(file, 0, length, tail=b"".join(parts[place + 1 :]))
        except OSError:
            # The client left. uvicorn notices it by the transport.
            self.transport.abort()
        finally:
            sender.close()
            sock.close()


h11_impl.RequestResponseCycle = PathSendCycle


def application(root):
    """Serves the files below a directory."""
    root = Path(root).resolve()

    async def answer(scope, receive, send):
        assert scope["type"] == "http"
        path = (root / scope["path"].lstrip("/")).resolve()
        if root not in path.parents or not path.is_file():
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body"})
            return
        headers = [(b"content-length", str(path.stat().st_size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if "http.response.pathsend" in scope.get("extensions", {}):
            await send({"type": "http.response.pathsend", "path": str(path)})
        else:
            await send({"type": "http.response.body", "body": path.read_bytes()})

    return answer


def main(directory, port="8000", loop="auto"):
    uvicorn.run(
        application(directory),
        port=int(port),
        http="h11",
        loop=loop,
        lifespan="off",
        ws="none",
        log_level="warning",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
