"""asyncio: files, loans, cancellation. With uvloop too, if it is installed."""

import array
import asyncio
import os
import random
import socket
import unittest

import haul_io
from common import LIMIT, Receiving, file_with, pair, pattern, small_buffers
from haul_io import aio

LOANS = int(os.environ.get("HAUL_TEST_LOANS", "2000"))


def loops():
    yield "asyncio", asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        return
    yield "uvloop", uvloop.new_event_loop


def run(task):
    """Runs a test on each event loop."""

    def test(self):
        for name, new_loop in loops():
            with self.subTest(loop=name), asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(asyncio.wait_for(task(self), LIMIT))

    return test


class Asyncio(unittest.TestCase):
    @run
    async def test_a_file_and_bytes_arrive_while_other_tasks_run(self):
        one, other = pair()
        small_buffers(one, other)
        one.setblocking(False)
        received = Receiving(other)
        content, ticks = pattern(20_000_000), 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with one, file_with(content) as file:
            async with aio.Sender(one) as sender:
                await sender.send_all(b"begin")
                sent = await sender.send_file(file, 10, 19_000_000, head=b"head", tail=b"tail")
                report = sender.report()
        ticking.cancel()
        self.assertEqual(sent, 19_000_008)
        self.assertEqual(received.result(), b"beginhead" + content[10:19_000_010] + b"tail")
        self.assertGreater(ticks, 10)
        self.assertIn("sendfile", report["files"])

    @run
    async def test_lent_buffers_come_back_as_futures(self):
        one, other = pair()
        one.setblocking(False)
        received = Receiving(other)
        buffers = [pattern(300_000, seed) for seed in range(40)]
        with one:
            async with aio.Sender(one) as sender:
                futures = [await sender.lend(buffer) for buffer in buffers]
                await sender.drain()
                returned = await asyncio.gather(*futures)
        for buffer, one_returned in zip(buffers, returned):
            self.assertIs(one_returned.buffer, buffer)
        self.assertEqual(received.result(), b"".join(buffers))

    @run
    async def test_a_loan_comes_back_without_another_call(self):
        one, other = pair()
        small_buffers(one, other)
        one.setblocking(False)
        with one:
            async with aio.Sender(one) as sender:
                future = await sender.lend(bytes(8 << 20))
                received = Receiving(other)
                self.assertEqual((await future).sent_bytes, 8 << 20)
        self.assertEqual(len(received.result()), 8 << 20)

    @run
    async def test_every_future_is_resolved_after_drain(self):
        for _ in range(60):
            one, other = pair()
            one.setblocking(False)
            received = Receiving(other)
            with one:
                async with aio.Sender(one) as sender:
                    futures = [await sender.lend(bytes(400_000)) for _ in range(3)]
                    await sender.drain()
                    self.assertTrue(all(future.done() for future in futures))
            received.result()

    @run
    async def test_close_and_abort_end_what_waits(self):
        for end in (aio.Sender.close, aio.Sender.abort):
            one, other = pair()
            small_buffers(one, other)
            one.setblocking(False)
            with one, other:
                sender = aio.Sender(one)
                loan = await sender.lend(bytes(8 << 20))
                waiting = [asyncio.create_task(sender.send_all(b"x")) for _ in range(2)]
                await asyncio.sleep(0.01)
                end(sender)
                for future in (loan, *waiting):
                    with self.assertRaises(ConnectionAbortedError):
                        await future
                end(sender)

    @run
    async def test_a_head_of_large_items_is_sent_whole(self):
        one, other = pair()
        one.setblocking(False)
        received = Receiving(other)
        head, tail = array.array("Q", range(200_000)), array.array("H", range(1000))
        with one, file_with(b"content") as file:
            async with aio.Sender(one) as sender:
                sent = await sender.send_file(file, head=head, tail=tail)
                with self.assertRaises(ValueError):
                    await sender.send_file(file, count=-5)
                self.assertEqual(await sender.send_file(file, position=100), 0)
        expected = head.tobytes() + b"content" + tail.tobytes()
        self.assertEqual(sent, len(expected))
        self.assertEqual(received.result(), expected)

    @run
    async def test_many_forwards_do_not_use_up_the_executor(self):
        tasks, ends = [], []
        for _ in range(40):
            (client, a), (b, server) = pair(), pair()
            tasks.append(asyncio.create_task(aio.forward(a, b)))
            ends += [client, a, b, server]
        loop = asyncio.get_running_loop()
        self.assertEqual(await loop.run_in_executor(None, lambda: 7), 7)
        for client in ends:
            client.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    @run
    async def test_loans_that_are_cancelled_at_random_arrive_whole_or_not_at_all(self):
        one, other = pair()
        small_buffers(one, other)
        one.setblocking(False)
        received = Receiving(other)
        chooser = random.Random(LOANS)
        lent, returned_ids, futures = [], [], []
        with one:
            async with aio.Sender(one, loans_max=8) as sender:
                for number in range(LOANS):
                    data = number.to_bytes(8, "little") * chooser.choice([1, 100, 3000, 20_000])
                    task = asyncio.create_task(sender.lend(data))
                    for _ in range(chooser.choice([0, 1, 2, 5])):
                        await asyncio.sleep(0)
                    if chooser.random() < 0.5:
                        task.cancel()
                    try:
                        future = await task
                    except asyncio.CancelledError:
                        continue
                    lent.append(data)
                    futures.append(future)
                    if chooser.random() < 0.3:
                        # The loan continues without its future.
                        future.cancel()
                await sender.drain()
                self.assertEqual(sender.report()["outstanding_loans"], 0)
                for data, future in zip(lent, futures):
                    if not future.cancelled():
                        self.assertIs((await future).buffer, data)
        self.assertEqual(received.result(), b"".join(lent))
        self.assertTrue(0 < len(lent) <= LOANS)

    @run
    async def test_a_file_can_be_continued_after_a_cancellation(self):
        one, other = pair()
        small_buffers(one, other)
        one.setblocking(False)
        content = pattern(4_000_000)
        with one, file_with(content) as file:
            async with aio.Sender(one) as sender:
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(sender.send_file(file, head=b"head"), 0.1)
                received = Receiving(other)
                await sender.send_file(file, head=b"head", position=sender.position)
        self.assertEqual(received.result(), b"head" + content)

    @run
    async def test_the_error_of_a_connection_is_raised(self):
        one, other = pair()
        one.setblocking(False)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        other.close()
        with one:
            async with aio.Sender(one) as sender:
                with self.assertRaises((ConnectionResetError, BrokenPipeError)):
                    while True:
                        await sender.send_all(bytes(1 << 20))

    @run
    async def test_a_blocking_socket_is_refused(self):
        one, other = pair()
        with one, other, self.assertRaisesRegex(ValueError, "non-blocking"):
            aio.Sender(one)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            if isinstance(writer.get_extra_info("socket"), asyncio.trsock.TransportSocket):
                with self.assertRaisesRegex(ValueError, "transport"):
                    aio.Sender(writer.get_extra_info("socket"))
            writer.close()
            await writer.wait_closed()

    @run
    async def test_forwarding_ends_with_its_task(self):
        (client, a), (b, server) = pair(), pair()
        with client, server, a, b:
            forwarding = asyncio.create_task(aio.forward(a, b))
            client.sendall(b"x")
            loop = asyncio.get_running_loop()
            self.assertEqual(await loop.run_in_executor(None, server.recv, 1), b"x")
            forwarding.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await forwarding


if __name__ == "__main__":
    unittest.main()
