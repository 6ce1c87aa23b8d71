"""Every call can be interrupted, and other threads run during every call."""

import signal
import threading
import time
import unittest

import haul_io
from common import LIMIT, file_with, pair, pattern, small_buffers


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


class Signals(unittest.TestCase):
    def setUp(self):
        self.before = signal.signal(signal.SIGALRM, interrupt)

    def tearDown(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)

    def assert_interruptible(self, call):
        # Repeated, in case a signal arrives before the call waits.
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        begin = time.monotonic()
        with self.assertRaises(Interrupted):
            call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.assertLess(time.monotonic() - begin, LIMIT)

    def test_calls_that_wait_for_the_peer(self):
        one, other = pair()
        small_buffers(one, other)
        with one, other, file_with(pattern(8 << 20)) as file:
            sender, receiver = haul_io.Sender(one), haul_io.Receiver(one)
            self.assert_interruptible(lambda: sender.send_file(file))
            self.assert_interruptible(lambda: sender.send_all(bytes(8 << 20)))
            self.assert_interruptible(lambda: receiver.receive_into(bytearray(1)))
            self.assert_interruptible(lambda: receiver.receive_exactly_into(bytearray(1)))
            self.assert_interruptible(lambda: receiver.discard(1))
            self.assert_interruptible(lambda: receiver.receive_into_file(file, 0, 1))
            sender.close()
            receiver.close()

    def test_calls_that_wait_for_loans(self):
        one, other = pair()
        small_buffers(one, other)
        with one, other:
            sender = haul_io.Sender(one)

            def lend_for_ever():
                while True:
                    sender.lend(bytes(200_000))

            self.assert_interruptible(lend_for_ever)
            if sender.report()["outstanding_loans"]:
                self.assert_interruptible(lambda: sender.wait_for_completions())
            sender.abort()

    def test_forwarding(self):
        (client, a), (b, server) = pair(), pair()
        with client, server, a, b:
            self.assert_interruptible(lambda: haul_io.forward(a, b))


class Threads(unittest.TestCase):
    def test_other_threads_run_and_may_use_the_same_sender(self):
        one, other = pair()
        small_buffers(one, other)
        with one, other, file_with(pattern(8 << 20)) as file:
            sender = haul_io.Sender(one)
            errors = []

            def send():
                try:
                    sender.send_file(file)
                except (ValueError, OSError) as error:
                    errors.append(error)

            thread = threading.Thread(target=send)
            thread.start()
            # The interpreter is free while the call waits, and the sender is not locked.
            for _ in range(100):
                sender.report()
                sender.wants()
                time.sleep(0.001)
            self.assertTrue(thread.is_alive())
            sender.abort()
            thread.join(LIMIT)
            self.assertFalse(thread.is_alive())
            self.assertEqual(len(errors), 1)


    def test_a_thread_that_lends_and_a_thread_that_takes_back(self):
        """Each thread may read the completion for which the other thread waits."""
        one, other = pair()

        def read_all():
            while other.recv(1 << 20):
                pass

        reading = threading.Thread(target=read_all)
        reading.start()
        with one, haul_io.Sender(one, loans_max=4) as sender:
            is_done = threading.Event()
            count = 0

            def take_back():
                nonlocal count
                while not is_done.is_set():
                    sender.wait_for_completions(LIMIT)
                    count += len(sender.reclaim())

            taking = threading.Thread(target=take_back)
            taking.start()
            for _ in range(200):
                while True:
                    try:
                        sender.lend(b"x" * 20_000)
                        break
                    except haul_io.LoanLimitError:
                        time.sleep(0)
            self.assertEqual(sender.wait_for_completions(LIMIT), 0)
            is_done.set()
            taking.join(LIMIT)
            self.assertFalse(taking.is_alive())
            self.assertEqual(count + len(sender.reclaim()), 200)
        reading.join(LIMIT)
        other.close()

if __name__ == "__main__":
    unittest.main()
