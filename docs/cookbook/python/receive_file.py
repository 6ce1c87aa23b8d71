"""Receives a file until the connection ends: python receive_file.py FILE HOST PORT"""

import socket
import sys

import haul_io

path, host, port = sys.argv[1:]
position = 0
with open(path, "wb") as file, socket.create_connection((host, int(port))) as sock:
    with haul_io.Receiver(sock) as receiver:
        while count := receiver.receive_into_file(file, position, 1 << 30):
            position += count
        print(receiver.report())
