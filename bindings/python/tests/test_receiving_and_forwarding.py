"""Receiving into memory and files, and forwarding between two sockets."""

import socket
import tempfile
import threading
import unittest

import haul_io
from common import LIMIT, Receiving, pair, pattern


def sending(sock, data):
    def run():
        with sock:
            sock.sendall(data)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class Receivers(unittest.TestCase):
    def test_a_preallocated_buffer_is_filled(self):
        data = pattern(5_000_000)
        one, other = pair()
        sending(one, data)
        buffer = bytearray(len(data) - 3)
        with other, haul_io.Receiver(other) as receiver:
            receiver.receive_exactly_into(buffer)
            rest = bytearray(10)
            self.assertEqual(receiver.receive_into(rest), 3)
            self.assertEqual(receiver.receive_into(rest), 0)
            with self.assertRaisesRegex(EOFError, "after 0 of 10 bytes"):
                receiver.receive_exactly_into(rest)
            with self.assertRaisesRegex(TypeError, "read-only"):
                receiver.receive_into(b"12")
        self.assertEqual(bytes(buffer) + bytes(rest[:3]), data)

    def test_a_stream_becomes_a_file(self):
        data = pattern(3_000_000)
        one, other = pair()
        sending(one, data)
        with other, haul_io.Receiver(other) as receiver, tempfile.TemporaryFile() as file:
            self.assertEqual(receiver.discard(1000), 1000)
            self.assertEqual(receiver.receive_into_file(file, 10, 2_000_000), 2_000_000)
            self.assertEqual(receiver.receive_into_file(file, 2_000_010, 1 << 40), 999_000)
            file.seek(10)
            self.assertEqual(file.read(), data[1000:])
            self.assertEqual(receiver.discard(1), 0)

    def test_a_timeout_holds(self):
        one, other = pair()
        other.settimeout(0.1)
        with one, other, haul_io.Receiver(other) as receiver:
            with self.assertRaises(TimeoutError):
                receiver.receive_into(bytearray(1))
            other.setblocking(False)
            with self.assertRaises(BlockingIOError):
                receiver.receive_into(bytearray(1))


class Forwarding(unittest.TestCase):
    def test_both_directions_arrive_and_large_pieces_are_spliced(self):
        (client, a), (b, server) = pair(), pair()
        request, response = pattern(2_000_000, 1), pattern(7_000_000, 2)
        reports = []

        def run():
            with a, b:
                reports.append(haul_io.forward(a, b))

        forwarding = threading.Thread(target=run)
        forwarding.start()

        def exchange(sock, data, received):
            def send():
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            received.append(Receiving(sock).result())
            sender.join()

        at_client, at_server = [], []
        server_side = threading.Thread(target=exchange, args=(server, response, at_server))
        server_side.start()
        exchange(client, request, at_client)
        server_side.join(LIMIT)
        forwarding.join(LIMIT)
        self.assertEqual(at_server, [request])
        self.assertEqual(at_client, [response])
        (report,) = reports
        for name, data in (("a_to_b", request), ("b_to_a", response)):
            direction = report[name]
            moved = direction["spliced_bytes"] + direction["copied_bytes"]
            self.assertEqual(moved, len(data))
            self.assertGreater(direction["spliced_bytes"], len(data) // 2)

    def test_a_silent_connection_ends_by_a_reset(self):
        (client, a), (b, server) = pair(), pair()
        with client, a, b, server:
            with self.assertRaises(TimeoutError):
                haul_io.forward(a, b, idle_timeout=0.1)
            a.close()
            b.close()
            with self.assertRaises(ConnectionResetError):
                client.recv(1)

    def test_arguments_are_checked(self):
        one, other = pair()
        with one, other:
            with self.assertRaisesRegex(ValueError, "adaptive, copy or splice"):
                haul_io.forward(one, other, method="send")
            with self.assertRaises(ValueError):
                haul_io.forward(one, other, idle_timeout=-1)


if __name__ == "__main__":
    unittest.main()
