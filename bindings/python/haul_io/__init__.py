"""Send, receive and forward bytes over TCP on Linux by the cheapest method.

* ``Sender(sock)`` sends bytes, ranges of files (``send_file``) and lent buffers (``lend``).
* ``Receiver(sock)`` receives into buffers and into files.
* ``forward(a, b)`` joins two sockets until both streams ended.
* ``sendfile(sock, file)`` replaces ``socket.sendfile``.
* ``haul_io.aio`` has the same for asyncio and uvloop.

Every call releases the GIL, honours the timeout of the socket, and can be interrupted by Ctrl-C.
"""

import os

from ._native import (
    FileEndedError,
    LoanLimitError,
    Receiver,
    Returned,
    Sender,
    StreamTornError,
    forward,
)

__all__ = [
    "FileEndedError",
    "LoanLimitError",
    "Receiver",
    "Returned",
    "Sender",
    "StreamTornError",
    "forward",
    "sendfile",
]


def sendfile(sock, file, offset=0, count=None):
    """Sends a file over a socket, with the arguments and the result of ``socket.sendfile``.

    The position of the file is behind the sent bytes afterwards. Unlike ``socket.sendfile``, it
    accepts every file with a descriptor, on blocking sockets and on sockets with a timeout. A
    non-blocking socket is a ``ValueError``, as for ``socket.sendfile``.
    """
    if sock.gettimeout() == 0:
        raise ValueError("non-blocking sockets are not supported: use Sender.send_file")
    if count is not None and count <= 0:
        raise ValueError("count must be a positive integer or None")
    left = max(os.fstat(file.fileno()).st_size - offset, 0)
    sent = 0
    try:
        with Sender(sock) as sender:
            sent = sender.send_file(file, offset, left if count is None else min(count, left))
    except BaseException as error:
        sent = getattr(error, "transferred", 0)
        raise
    finally:
        if sent and hasattr(file, "seek"):
            file.seek(offset + sent)
    return sent
