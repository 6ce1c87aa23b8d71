"""Sending bytes and files from blocking, timed and non-blocking sockets."""

import os
import socket
import ssl
import time
import unittest

import haul_io
from common import LIMIT, Receiving, descriptors, file_with, pair, pattern, small_buffers


class Files(unittest.TestCase):
    def test_head_range_and_tail_arrive_in_order(self):
        content = pattern(3_000_000)
        for offset, count in [(0, None), (1, 2_999_999), (4096, 5000), (2_999_999, 1), (7, 0)]:
            with self.subTest(offset=offset, count=count), file_with(content) as file:
                one, other = pair()
                received = Receiving(other)
                with one, haul_io.Sender(one) as sender:
                    sent = sender.send_file(file, offset, count, head=b"head", tail=b"tail")
                end = len(content) if count is None else offset + count
                expected = b"head" + content[offset:end] + b"tail"
                self.assertEqual(sent, len(expected))
                self.assertEqual(received.result(), expected)

    def test_a_file_is_sent_without_a_copy(self):
        one, other = pair()
        received = Receiving(other)
        with one, file_with(pattern(1 << 20)) as file, haul_io.Sender(one) as sender:
            sender.send_file(file)
            report = sender.report()
        self.assertEqual(len(received.result()), 1 << 20)
        self.assertEqual(sum(one["bytes"] for one in report["files"].values()), 1 << 20)
        self.assertIn("sendfile", report["files"])
        self.assertEqual(report["fallbacks"], [])

    def test_sendfile_does_what_the_method_of_socket_does(self):
        content = pattern(500_000)
        for arguments in [(), (1000,), (1000, 20_000), (499_999, 5), (600_000,), (600_000, 1)]:
            results = []
            for send in (haul_io.sendfile, socket.socket.sendfile):
                one, other = pair()
                received = Receiving(other)
                with file_with(content) as file, one:
                    result = send(one, file, *arguments)
                    results.append((result, file.tell()))
                results[-1] += (received.result(),)
            self.assertEqual(results[0], results[1], arguments)
        one, other = pair()
        with one, other, file_with(b"x") as file, self.assertRaises(ValueError):
            haul_io.sendfile(one, file, 0, 0)

    def test_a_file_that_is_too_short_is_an_error_with_a_code(self):
        one, other = pair()
        with one, other, file_with(b"abc") as file, haul_io.Sender(one) as sender:
            with self.assertRaises(haul_io.FileEndedError) as caught:
                sender.send_file(file, 0, 10)
        self.assertEqual(caught.exception.code, "ended")
        self.assertIn("byte 3", str(caught.exception))

    def test_calls_do_not_leave_descriptors(self):
        one, other = pair()
        with one, other, file_with(b"abc") as file, haul_io.Sender(one) as sender:
            sender.send_file(file)
            before = descriptors()
            for _ in range(50):
                sender.send_file(file)
            self.assertEqual(descriptors(), before)
        self.assertEqual(one.fileno(), -1)


class Sockets(unittest.TestCase):
    def test_bytes_of_every_kind_of_buffer_are_sent(self):
        one, other = pair()
        received = Receiving(other)
        with one, haul_io.Sender(one) as sender:
            for data in (b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], memoryview(b"gh")):
                sender.send_all(data)
            self.assertEqual(sender.send(b""), 0)
            with self.assertRaises(BufferError):
                sender.send_all(memoryview(b"abcdef")[::2])
            with self.assertRaises(TypeError):
                sender.send_all("text")
        self.assertEqual(received.result(), b"abcdefgh")

    def test_the_methods_of_a_blocking_socket_still_wait(self):
        one, other = pair()
        with one, other, haul_io.Sender(one):
            self.assertGreater(one.gettimeout(), 1_000_000)
            other.sendall(b"x")
            self.assertEqual(one.recv(1), b"x")

    def test_a_timeout_holds(self):
        one, other = pair()
        small_buffers(one, other)
        one.settimeout(0.2)
        with one, other, file_with(pattern(8 << 20)) as file, haul_io.Sender(one) as sender:
            with self.assertRaises(TimeoutError):
                sender.send_file(file)
            with self.assertRaises(TimeoutError):
                sender.send_all(bytes(8 << 20))

    def test_a_non_blocking_socket_sends_what_it_has_room_for(self):
        one, other = pair()
        small_buffers(one, other)
        one.setblocking(False)
        content = pattern(8 << 20)
        with one, file_with(content) as file, haul_io.Sender(one) as sender:
            position = sender.send_file(file, head=b"head")
            self.assertTrue(0 < position < len(content))
            with self.assertRaises(BlockingIOError):
                while True:
                    position += sender.send_file(file, head=b"head", position=position)
            received = Receiving(other)
            one.settimeout(LIMIT)
            sender.send_file(file, head=b"head", position=position)
        self.assertEqual(received.result(), b"head" + content)

    def test_errors_have_the_class_of_python_and_the_message_of_haul(self):
        one, other = pair()
        with self.assertRaisesRegex(ValueError, "unknown path"):
            haul_io.Sender(one, method="sendfil")
        with self.assertRaisesRegex(ValueError, "limits of 0"):
            haul_io.Sender(one, loans_max=0)
        sender = haul_io.Sender(one)
        folder = os.open("/", os.O_RDONLY)
        with self.assertRaises(OSError) as caught:
            sender.send_file(folder, 0, 10)
        os.close(folder)
        self.assertIsNotNone(caught.exception.errno)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        other.close()
        with self.assertRaises((ConnectionResetError, BrokenPipeError)):
            while True:
                sender.send_all(bytes(100_000))
        sender.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            sender.send(b"x")
        one.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            haul_io.Sender(one)
        with self.assertRaises((AttributeError, TypeError)):
            haul_io.Sender("no socket")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, file_with(b"x") as file:
            with self.assertRaisesRegex(TypeError, "stream"):
                haul_io.Sender(datagrams).send_file(file)

    def test_a_refused_object_stays_as_it_was(self):
        reading, writing = os.pipe()
        with self.assertRaises(OSError):
            haul_io.Sender(writing)
        self.assertTrue(os.get_blocking(writing))
        os.close(reading)
        os.close(writing)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with self.assertRaisesRegex(ValueError, "listens"):
                haul_io.Sender(listener)
            self.assertIsNone(listener.gettimeout())
        one, other = pair()
        with one, other:
            with self.assertRaises(OSError):
                haul_io.forward(one, 0)
            self.assertIsNone(one.gettimeout())

    def test_an_error_states_the_bytes_before_it(self):
        one, other = pair()
        small_buffers(one, other)
        one.settimeout(0.1)
        content = pattern(8 << 20)
        with one, file_with(content) as file:
            with self.assertRaises(TimeoutError) as caught:
                haul_io.sendfile(one, file)
            sent = caught.exception.transferred
            self.assertEqual(file.tell(), sent)
            self.assertGreater(sent, 0)
            with haul_io.Sender(one) as sender:
                with self.assertRaises(TimeoutError) as caught:
                    sender.send_all(content[sent:])
                sent += caught.exception.transferred
                received = Receiving(other)
                one.settimeout(LIMIT)
                sender.send_all(content[sent:])
                with self.assertRaises(ValueError):
                    sender.send_file(file, 0, 2**64 - 1, head=b"head")
        self.assertEqual(received.result(), content)

    def test_no_call_uses_the_cpu_while_a_completion_waits(self):
        one, other = pair()
        with one, other, haul_io.Sender(one) as sender, haul_io.Receiver(one) as receiver:
            sender.lend(bytes(100_000))
            received = bytearray()
            while len(received) < 100_000:
                received += other.recv(1 << 16)
            one.settimeout(0.5)
            for call in (
                lambda: receiver.receive_into(bytearray(1)),
                lambda: sender.send_all(bytes(64 << 20)),
            ):
                begin = time.thread_time()
                with self.assertRaises(TimeoutError):
                    call()
                # Of half a second. The bytes that the socket accepts take a little.
                self.assertLess(time.thread_time() - begin, 0.3)

    def test_a_socket_that_became_blocking_again_is_still_interruptible(self):
        one, other = pair()
        small_buffers(one, other)
        with one, other, haul_io.Sender(one) as sender:
            one.setblocking(True)
            self.assertIsNone(one.gettimeout())
            sender.wants()
            sender.send(b"x")
            self.assertGreater(one.gettimeout(), 1_000_000)

    def test_a_tls_socket_is_refused(self):
        one, other = pair()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with other, context.wrap_socket(one, do_handshake_on_connect=False) as encrypted:
            with self.assertRaisesRegex(TypeError, "TLS"):
                haul_io.Sender(encrypted)


if __name__ == "__main__":
    unittest.main()
