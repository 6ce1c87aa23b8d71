"""Sends a file, by sendfile: python send_file.py FILE HOST PORT"""

import socket
import sys

import haul_io

path, host, port = sys.argv[1:]
with open(path, "rb") as file, socket.create_connection((host, int(port))) as sock:
    with haul_io.Sender(sock) as sender:
        sender.send_file(file)
        print(sender.report()["files"])
