"""Sends a file over TCP in one of four ways, for a comparison of their cost.

    python send_cost.py haul|sendfile|sendall|chunks [FILE_MIB] [TIMES] [HOST:PORT]

Without HOST:PORT, a thread of the program receives over loopback.

Compare two ways in the same minutes:

    haul soak --runs 9 --bytes 2560MiB --versus "python send_cost.py sendfile" -- \
        python send_cost.py haul
"""

import os
import socket
import sys
import tempfile
import threading

CHUNK = 1 << 20


def send_whole(sock, file, length):
    """Reads the whole file into memory, and sends the memory."""
    file.seek(0)
    sock.sendall(file.read())


def send_chunks(sock, file, length):
    """Reads the file into memory by pieces of 1 MiB, and sends each piece."""
    file.seek(0)
    while data := file.read(CHUNK):
        sock.sendall(data)


def send_by_os(sock, file, length):
    """``os.sendfile`` in a loop."""
    offset = 0
    while offset < length:
        offset += os.sendfile(sock.fileno(), file.fileno(), offset, length - offset)


def send_by_haul(sender, file, length):
    sender.send_file(file, 0, length)


def new_socket():
    """Another default congestion control, such as BBR, paces, which costs CPU time."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return sock


def discard(listener):
    with listener:
        sock, _ = listener.accept()
    buffer = bytearray(CHUNK)
    with sock:
        # MSG_TRUNC: the kernel discards the bytes without a copy, so that the sender counts.
        while sock.recv_into(buffer, CHUNK, socket.MSG_TRUNC):
            pass


def start_receiver():
    """Returns the address of a thread that receives from one connection."""
    listener = new_socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    threading.Thread(target=discard, args=(listener,)).start()
    return listener.getsockname()


def send(way, sock, file, length, times):
    if way == "haul":
        import haul_io

        with haul_io.Sender(sock) as sender:
            for _ in range(times):
                send_by_haul(sender, file, length)
    else:
        by_way = {"sendfile": send_by_os, "sendall": send_whole, "chunks": send_chunks}
        for _ in range(times):
            by_way[way](sock, file, length)


def main(way="haul", mib="256", times="10", address=None):
    with tempfile.TemporaryFile() as file, new_socket() as sock:
        file.write(os.urandom(CHUNK) * int(mib))
        file.flush()
        if address is None:
            sock.connect(start_receiver())
        else:
            host, port = address.rsplit(":", 1)
            sock.connect((host, int(port)))
        send(way, sock, file, int(mib) << 20, int(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
