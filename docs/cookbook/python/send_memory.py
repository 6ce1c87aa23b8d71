"""Sends memory without a copy, if the network device allows: python send_memory.py FILE HOST PORT"""

import pathlib
import socket
import sys

import haul_io

path, host, port = sys.argv[1:]
memory = pathlib.Path(path).read_bytes()
with socket.create_connection((host, int(port))) as sock, haul_io.Sender(sock) as sender:
    view = memoryview(memory)
    for start in range(0, len(view), 1 << 20):
        sender.lend(view[start : start + (1 << 20)])
    sender.wait_for_completions()
    copied = sum(not returned.zero_copied for returned in sender.reclaim())
    print(f"loans that were copied: {copied}")
