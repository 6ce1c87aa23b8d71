"""The programs of docs/cookbook/python."""

import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

from common import LIMIT, pattern

COOKBOOK = Path(__file__).resolve().parents[3] / "docs" / "cookbook" / "python"
CONTENT = pattern(20_000_000)


def receive_all(sock):
    sock.settimeout(LIMIT)
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


class Cookbook(unittest.TestCase):
    def run_beside(self, name, path, serve):
        """Runs a program that connects to this process, and returns what ``serve`` returned."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LIMIT)
            port = listener.getsockname()[1]
            program = subprocess.Popen(
                [sys.executable, COOKBOOK / name, path, "127.0.0.1", str(port)],
                stdout=subprocess.DEVNULL,
            )
            try:
                sock, _ = listener.accept()
                with sock:
                    result = serve(sock)
                self.assertEqual(program.wait(LIMIT), 0)
            finally:
                program.kill()
                program.wait()
        return result

    def test_files_and_memory_are_sent(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(CONTENT)
            file.flush()
            for name in ["send_file.py", "send_file_asyncio.py", "send_memory.py"]:
                with self.subTest(name):
                    received = self.run_beside(name, file.name, receive_all)
                    self.assertTrue(received == CONTENT, f"{len(received)} bytes")

    def test_a_file_is_received(self):
        def serve(sock):
            sock.settimeout(LIMIT)
            sock.sendall(CONTENT)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            self.run_beside("receive_file.py", path, serve)
            self.assertTrue(path.read_bytes() == CONTENT)

    def test_bytes_are_relayed(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LIMIT)
            port = listener.getsockname()[1]
            program = subprocess.Popen(
                [sys.executable, COOKBOOK / "relay.py", "0", "127.0.0.1", str(port)],
                stdout=subprocess.PIPE,
            )
            try:
                own_port = int(program.stdout.readline().split()[-1])
                with socket.create_connection(("127.0.0.1", own_port)) as client:
                    server, _ = listener.accept()
                    with server:
                        self.check_directions(client, server)
            finally:
                program.kill()
                program.wait()
                program.stdout.close()

    def check_directions(self, client, server):
        received = {}

        def receive(name, sock):
            received[name] = receive_all(sock)

        def send(sock):
            sock.sendall(CONTENT)
            sock.shutdown(socket.SHUT_WR)

        threads = [
            threading.Thread(target=receive, args=("client", client)),
            threading.Thread(target=receive, args=("server", server)),
            threading.Thread(target=send, args=(client,)),
            threading.Thread(target=send, args=(server,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        for name in ["client", "server"]:
            self.assertTrue(received[name] == CONTENT, name)


if __name__ == "__main__":
    unittest.main()
