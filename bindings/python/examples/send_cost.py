"""Sends a file over loopback in one of three ways, for a comparison of their cost.

    python send_cost.py haul|sendfile|sendall [FILE_MIB] [TIMES]

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


def send_all(sock, file, length):
    """Reads the file into memory, and sends the memory."""
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
    sock, _ = listener.accept()
    buffer = bytearray(CHUNK)
    with sock:
        # MSG_TRUNC: the kernel discards the bytes without a copy, so that the sender counts.
        while sock.recv_into(buffer, CHUNK, socket.MSG_TRUNC):
            pass


def main(way="haul", mib="256", times="10"):
    length = int(mib) << 20
    with tempfile.TemporaryFile() as file, new_socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        file.write(os.urandom(CHUNK) * int(mib))
        file.flush()
        receiving = threading.Thread(target=discard, args=(listener,))
        receiving.start()
        with new_socket() as sock:
            sock.connect(listener.getsockname())
            if way == "haul":
                import haul_io

                with haul_io.Sender(sock) as sender:
                    for _ in range(int(times)):
                        send_by_haul(sender, file, length)
            else:
                send = {"sendfile": send_by_os, "sendall": send_all}[way]
                for _ in range(int(times)):
                    send(sock, file, length)
        receiving.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
