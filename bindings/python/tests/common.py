"""What the tests share: connections over loopback, files with a pattern, receiving threads."""

import faulthandler
import os
import socket
import tempfile
import threading

LIMIT = 120
"""The longest wait of a test, in seconds."""

# A test that hangs ends with the stacks of all threads.
faulthandler.dump_traceback_later(10 * LIMIT, exit=True)


def pair():
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def small_buffers(*sockets):
    """Limits the buffers, so that a peer that does not read soon blocks the sender."""
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)


def pattern(length, seed=0):
    """Bytes that depend on their position and on the seed."""
    block = bytes((i * 167 + seed * 31 + (i >> 8) * 13) & 0xFF for i in range(65521))
    return (block * (length // len(block) + 1))[:length]


def file_with(content):
    """A temporary file with this content."""
    file = tempfile.TemporaryFile()
    file.write(content)
    file.flush()
    file.seek(0)
    return file


class Receiving:
    """Reads a socket to its end on another thread."""

    def __init__(self, sock):
        self._parts = []
        self._thread = threading.Thread(target=self._run, args=(sock,), daemon=True)
        self._thread.start()

    def _run(self, sock):
        with sock:
            sock.settimeout(LIMIT)
            while part := sock.recv(1 << 16):
                self._parts.append(part)

    def result(self):
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the stream does not end"
        return b"".join(self._parts)


def descriptors():
    return len(os.listdir("/proc/self/fd"))
