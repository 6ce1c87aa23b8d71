"""Lent buffers: the object comes back unchanged, and cannot change while it is lent."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import unittest

import haul_io
from common import LIMIT, Receiving, pair, pattern, small_buffers


def suppressed(call):
    try:
        call()
    except (OSError, ValueError):
        pass


class Loans(unittest.TestCase):
    def test_the_same_object_comes_back(self):
        one, other = pair()
        received = Receiving(other)
        buffers = [pattern(length, length) for length in (1, 4096, 100_000, 1 << 20, 3_000_000)]
        with one, haul_io.Sender(one) as sender:
            ids = [sender.lend(buffer) for buffer in buffers]
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            returned = {one.id: one for one in sender.reclaim()}
            self.assertEqual(sender.report()["outstanding_loans"], 0)
        self.assertEqual(ids, sorted(ids))
        for number, buffer in zip(ids, buffers):
            self.assertIs(returned[number].buffer, buffer)
            self.assertEqual(returned[number].sent_bytes, len(buffer))
            self.assertIn(returned[number].zero_copied, (True, False))
        self.assertEqual(received.result(), b"".join(buffers))

    def test_a_buffer_that_can_change_is_refused_unless_it_is_allowed(self):
        one, other = pair()
        received = Receiving(other)
        with one, haul_io.Sender(one) as sender:
            data = bytearray(pattern(200_000))
            with self.assertRaisesRegex(TypeError, "allow_mutable"):
                sender.lend(data)
            sender.lend(memoryview(data).toreadonly())
            sender.lend(data, allow_mutable=True)
            # A lent buffer cannot move.
            with self.assertRaises(BufferError):
                data.append(0)
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            self.assertEqual(len(sender.reclaim()), 2)
            data.append(0)
            with self.assertRaisesRegex(ValueError, "empty"):
                sender.lend(b"")
            with self.assertRaisesRegex(ValueError, "over the limit"):
                sender.lend(bytes(17 << 20))
        self.assertEqual(received.result(), pattern(200_000) * 2)

    def test_the_limit_of_loans_is_an_error_until_some_are_reclaimed(self):
        one, other = pair()
        received = Receiving(other)
        one.setblocking(False)
        with one, haul_io.Sender(one, loans_max=2) as sender:
            sender.lend(b"a" * 20_000)
            sender.lend(b"b" * 20_000)
            caught = None
            # Fewer bytes than the kernel copies before the library stops to lend.
            for _ in range(40):
                try:
                    sender.lend(b"c" * 20_000)
                except haul_io.LoanLimitError as error:
                    caught = error
                    break
                except BlockingIOError:
                    # The socket is full until the peer reads.
                    time.sleep(0.001)
            if caught is None:
                self.skipTest("the kernel completed each loan before the next loan")
            self.assertEqual(caught.code, "loan-limit")
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            self.assertGreaterEqual(len(sender.reclaim()), 2)
            sender.lend(b"d" * 20_000)
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
        self.assertTrue(received.result().endswith(b"d" * 20_000))

    def test_a_dropped_sender_keeps_its_buffers_until_the_peer_has_them(self):
        one, other = pair()
        data = bytearray(pattern(300_000))
        with one:
            sender = haul_io.Sender(one)
            sender.lend(data, allow_mutable=True)
            sender.close()
            del sender
        self.assertEqual(Receiving(other).result(), pattern(300_000))
        # The reaper releases the buffer soon after the peer's acknowledgement.
        for _ in range(LIMIT * 100):
            try:
                data.append(0)
                break
            except BufferError:
                time.sleep(0.01)
        else:
            self.fail("the buffer is never released")

    def test_a_forked_child_cannot_use_the_loans_of_its_parent(self):
        one, other = pair()
        received = Receiving(other)
        with one, haul_io.Sender(one) as sender:
            sender.lend(pattern(100_000))
            child = os.fork()
            if child == 0:
                try:
                    sender.reclaim()
                    os._exit(1)
                except RuntimeError:
                    os._exit(0)
                except BaseException:
                    os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            self.assertEqual(len(sender.reclaim()), 1)
        self.assertEqual(received.result(), pattern(100_000))

    def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent(self):
        one, other = pair()
        small_buffers(one, other)
        with one, other:
            sender, receiver = haul_io.Sender(one), haul_io.Receiver(one)
            calls = (lambda: sender.send_all(bytes(8 << 20)), lambda: receiver.discard(1))
            for call in calls:
                threading.Thread(target=lambda call=call: suppressed(call), daemon=True).start()
            time.sleep(0.1)
            child = os.fork()
            if child == 0:
                try:
                    for call in (sender.report, sender.fileno, receiver.report):
                        try:
                            call()
                            os._exit(1)
                        except RuntimeError:
                            pass
                    sender.close()
                    receiver.close()
                    sender.abort()
                    os._exit(0)
                except BaseException:
                    os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            sender.abort()

    def test_an_error_after_the_loan_was_taken_names_the_loan(self):
        one, other = pair()
        small_buffers(one, other)
        one.settimeout(0.1)
        with one, haul_io.Sender(one) as sender:
            with self.assertRaises(TimeoutError) as caught:
                sender.lend(bytes(8 << 20))
            received = Receiving(other)
            one.settimeout(LIMIT)
            sender.flush()
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            self.assertEqual([one.id for one in sender.reclaim()], [caught.exception.loan])
        self.assertEqual(len(received.result()), 8 << 20)

    def test_a_wait_for_completions_does_not_block_other_calls(self):
        one, other = pair()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        with one, other:
            sender = haul_io.Sender(one)
            sender.lend(bytes(1 << 20))
            waiting = threading.Thread(target=lambda: suppressed(sender.wait_for_completions))
            waiting.start()
            for _ in range(20):
                sender.wants()
            sender.abort()
            waiting.join(LIMIT)
            self.assertFalse(waiting.is_alive())

    def test_the_interpreter_ends_with_loans_in_flight(self):
        program = textwrap.dedent(
            """
            import haul_io, socket
            with socket.create_server(("127.0.0.1", 0)) as listener:
                one = socket.create_connection(listener.getsockname())
                other, _ = listener.accept()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            senders = [haul_io.Sender(one)]
            senders[0].lend(bytes(500_000))
            print("lent", flush=True)
            """
        )
        for ending in ("", "senders[0].close()", "senders.clear(); import sys; sys.exit(0)"):
            result = subprocess.run(
                [sys.executable, "-c", program + ending],
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            self.assertEqual((result.returncode, result.stdout), (0, "lent\n"), result.stderr)


if __name__ == "__main__":
    unittest.main()
