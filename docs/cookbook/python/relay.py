"""Relays each client to a host, spliced: python relay.py LISTEN_PORT HOST PORT"""

import socket
import sys
import threading

import haul_io

listen_port, host, port = sys.argv[1:]


def relay(client):
    with client, socket.create_connection((host, int(port))) as server:
        print(haul_io.forward(client, server, idle_timeout=60))


with socket.create_server(("127.0.0.1", int(listen_port))) as listener:
    print("listening at port", listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=relay, args=(client,)).start()
