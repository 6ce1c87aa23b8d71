"""Sends a file from asyncio, by sendfile: python send_file_asyncio.py FILE HOST PORT"""

import asyncio
import socket
import sys

import haul_io.aio


async def main(path, host, port):
    sock = socket.create_connection((host, int(port)))
    sock.setblocking(False)
    with open(path, "rb") as file, sock:
        async with haul_io.aio.Sender(sock) as sender:
            await sender.send_file(file)
            print(sender.report()["files"])


asyncio.run(main(*sys.argv[1:]))
