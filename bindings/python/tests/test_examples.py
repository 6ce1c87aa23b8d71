"""The examples: uvicorn sends files by the extension pathsend, and weights arrive in an array."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

from common import LIMIT, pattern

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until_accepting(port):
    for _ in range(LIMIT * 20):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("the example does not accept connections")


class Program:
    def __init__(self, *arguments):
        self.process = subprocess.Popen([sys.executable, *map(str, arguments)])

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(LIMIT)


def loops():
    yield "asyncio"
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return
    yield "uvloop"


class Asgi(unittest.TestCase):
    def test_uvicorn_sends_files(self):
        try:
            import uvicorn  # noqa: F401
        except ImportError:
            self.skipTest("uvicorn is not installed")
        for loop in loops():
            with self.subTest(loop=loop), tempfile.TemporaryDirectory() as folder:
                self.check(folder, loop)

    def check(self, folder, loop):
        files = {"large": pattern(30_000_000), "small": b"x", "empty": b""}
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        port = free_port()
        with Program(EXAMPLES / "asgi_files.py", folder, port, loop):
            wait_until_accepting(port)
            base = f"http://127.0.0.1:{port}/"
            for name in random.Random(1).choices(list(files), k=12):
                with urllib.request.urlopen(base + name, timeout=LIMIT) as response:
                    self.assertEqual(response.read(), files[name])
            with self.assertRaises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(base + "absent", timeout=LIMIT)
            self.assertEqual(caught.exception.code, 404)
            caught.exception.close()
            # Two requests on one connection, and a client that leaves.
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.settimeout(LIMIT)
                sock.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
                received = b""
                while received.count(b"\r\n\r\nx") < 2:
                    part = sock.recv(4096)
                    self.assertTrue(part, received)
                    received += part
                sock.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
                sock.recv(1000)
            with urllib.request.urlopen(base + "large", timeout=LIMIT) as response:
                self.assertEqual(response.read(), files["large"])
            request = urllib.request.Request(base + "large", method="HEAD")
            with urllib.request.urlopen(request, timeout=LIMIT) as response:
                self.assertEqual(response.headers["content-length"], "30000000")


class Weights(unittest.TestCase):
    def test_they_arrive_in_an_array(self):
        try:
            import numpy  # noqa: F401
        except ImportError:
            self.skipTest("numpy is not installed")
        port = free_port()
        program = EXAMPLES / "weights.py"
        with Program(program, "serve", port, "0.25"):
            wait_until_accepting(port)
            for way in ("haul", "recv_into"):
                command = [sys.executable, program, "fetch", "127.0.0.1", str(port), way]
                output = subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=LIMIT
                )
                self.assertRegex(output.stdout, "GiB/s")


class Cost(unittest.TestCase):
    def test_each_way_sends(self):
        for way in ("haul", "sendfile", "sendall"):
            program = EXAMPLES / "send_cost.py"
            subprocess.run([sys.executable, program, way, "4", "2"], check=True, timeout=LIMIT)


if __name__ == "__main__":
    unittest.main()
