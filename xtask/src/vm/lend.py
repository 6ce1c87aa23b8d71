"""Lends objects of type ``bytes`` to the host. Fails if a loan was copied, or if the host received
other bytes.

    python3 lend.py HOST PORT FILE
"""

import socket
import struct
import sys

import haul_io

FIRST_BYTES = 16 << 10
LOAN_BYTES = 1 << 20
LIMIT = 60

host, port, path = sys.argv[1:]
with open(path, "rb") as file:
    stream = file.read()
with socket.create_connection((host, int(port)), LIMIT) as sock:
    # The host reads at once (peer.rs).
    sock.sendall(b"R")
    with haul_io.Sender(sock) as sender:
        # The completion of the first loan of a socket shows how the kernel numbers the loans. Until
        # then, the library copies.
        sender.lend(stream[:FIRST_BYTES])
        sender.wait_for_completions(LIMIT)
        sender.reclaim()
        for start in range(FIRST_BYTES, len(stream), LOAN_BYTES):
            sender.lend(stream[start : start + LOAN_BYTES])
        in_flight = sender.wait_for_completions(LIMIT)
        loans = sender.reclaim()
    sock.shutdown(socket.SHUT_WR)
    (unchanged,) = struct.unpack("<Q", sock.recv(8, socket.MSG_WAITALL))
copied = sum(not loan.zero_copied for loan in loans)
print(f"loans of {LOAN_BYTES} bytes by Python: {len(loans) - copied} zero-copied, {copied} copied")
if in_flight or copied or not loans or unchanged != len(stream):
    sys.exit(f"{in_flight} sends in flight, {unchanged} of {len(stream)} bytes unchanged")
