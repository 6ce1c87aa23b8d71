"""Sending and forwarding for asyncio and uvloop.

The event loop never sees the socket itself. A completion of a lent buffer raises ``EPOLLERR``, which
event loops take for the end of a connection. So the socket is in a private epoll set, and the event
loop watches the descriptor of this set, which is only ever readable.
"""

import asyncio
import os
import select
import socket
import threading
from asyncio.trsock import TransportSocket

from . import _native

__all__ = ["Sender", "forward"]

# The bytes of a file that are checked and sent before other tasks get a turn.
_TURN_BYTES = 2 << 20


class _Events:
    """The events of a socket, by an edge-triggered epoll set that the event loop watches."""

    def __init__(self, descriptor, on_events):
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events
        self._waiters = []
        self._epoll = select.epoll()
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        self._epoll.register(descriptor, events)
        self._loop.add_reader(self._epoll.fileno(), self._read)

    def _read(self):
        for _, events in self._epoll.poll(0):
            self._on_events(events)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def next(self):
        """A future of the next event. No event is lost between a call that would block and this
        call, because the event loop reads the events."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def close(self):
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _end(waiter)


def _end(future):
    """Ends a future whose sender was closed."""
    if not future.done():
        future.set_exception(ConnectionAbortedError("the sender was closed"))
        # No message if nobody waits for the future.
        future.exception()


class Sender:
    """Sends bytes, files and lent buffers over a non-blocking socket.

    The socket must not belong to a transport. One task at a time sends: a second task waits. A task
    that is cancelled during ``send_all`` or ``send_file`` leaves a part of the message in the
    stream, so close the connection, or continue at ``position``.
    """

    def __init__(self, sock, *, method=None, loans_max=64, loan_bytes_max=16 << 20):
        if isinstance(sock, TransportSocket):
            raise ValueError(
                "the socket belongs to a transport, which may encrypt, and sends by itself: pass a "
                "socket of its own"
            )
        if sock.gettimeout() != 0:
            raise ValueError("the socket must be non-blocking: call sock.setblocking(False)")
        self._native = _native.Sender(
            sock, method=method, loans_max=loans_max, loan_bytes_max=loan_bytes_max
        )
        self._lock = asyncio.Lock()
        self._loans = {}
        self._error = None
        self._is_closed = False
        #: The bytes of the latest ``send_all`` or ``send_file`` that the socket accepted.
        self.position = 0
        self._events = _Events(self._native.fileno(), self._on_events)

    def _on_events(self, events):
        try:
            if events & select.EPOLLERR:
                self._native.on_error_event()
            if events & select.EPOLLOUT:
                # The rest of a loan that the socket accepted in part.
                self._native.flush()
        except BlockingIOError:
            pass
        except OSError as error:
            # The next call raises it. Lent buffers still come back.
            self._error = error
        self._take_returned()

    def _take_returned(self):
        """Resolves the futures of the buffers that came back. Returns whether there were any."""
        all_returned = self._native.reclaim()
        for returned in all_returned:
            loan = self._loans.pop(returned.id, None)
            if loan is not None and not loan.done():
                loan.set_result(returned)
        return bool(all_returned)

    def _check(self):
        if self._is_closed:
            raise ConnectionAbortedError("the sender was closed")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def _repeat(self, call):
        """Calls until the socket is ready."""
        while True:
            self._check()
            try:
                result = call()
                # The call may have sent the rest of a loan, which has no event then.
                self._take_returned()
                return result
            except BlockingIOError:
                await self._events.next()

    async def send_all(self, data):
        """Sends all bytes."""
        view = memoryview(data).cast("B")
        async with self._lock:
            self.position = 0
            while self.position < len(view):
                part = view[self.position :]
                self.position += await self._repeat(lambda: self._native.send(part))

    async def send_file(self, file, offset=0, count=None, *, head=b"", tail=b"", position=0):
        """Sends ``head``, a range of a file, and ``tail``, from the byte ``position`` on.

        A part of the file that is not in memory is read by a thread of the default executor, so that
        other tasks do not wait for the disk. Returns the number of bytes of all three.
        """
        loop = asyncio.get_running_loop()
        if count is None:
            descriptor = file if isinstance(file, int) else file.fileno()
            count = max(os.fstat(descriptor).st_size - offset, 0)
        if offset < 0 or count < 0 or position < 0:
            raise ValueError("offset, count and position must not be negative")
        # Bytes, and not the items of an array.
        head_bytes = memoryview(head).nbytes
        total = head_bytes + count + memoryview(tail).nbytes
        async with self._lock:
            self.position = position
            while self.position < total:
                in_file = min(max(self.position - head_bytes, 0), count)
                turn = min(_TURN_BYTES, count - in_file)
                begin = offset + in_file
                if turn and not _native.is_resident(file, begin, turn):
                    await loop.run_in_executor(None, _native.prefetch, file, begin, turn)
                # Only the part that was checked. The tail follows the whole range.
                is_last = in_file + turn == count
                self.position += await self._repeat(
                    lambda: self._native.send_file(
                        file,
                        offset,
                        in_file + turn,
                        head=head,
                        tail=tail if is_last else b"",
                        position=self.position,
                    )
                )
                await asyncio.sleep(0)
            return max(total - position, 0)

    async def lend(self, buffer, *, allow_mutable=False):
        """Lends a buffer, and returns a future of the ``Returned`` buffer.

        The call waits for room among the loans. If the call is cancelled, nothing was lent. If the
        future is cancelled or dropped, the loan continues, and the buffer is kept until its end.
        """
        async with self._lock:
            number = await self._repeat_lend(buffer, allow_mutable)
            loan = asyncio.get_running_loop().create_future()
            self._loans[number] = loan
        self._take_returned()
        return loan

    async def _repeat_lend(self, buffer, allow_mutable):
        while True:
            self._check()
            try:
                self._native.flush()
                return self._native.lend(buffer, allow_mutable=allow_mutable)
            except (BlockingIOError, _native.LoanLimitError):
                if not self._take_returned():
                    await self._events.next()

    async def drain(self):
        """Waits until the socket accepted every lent byte, and the kernel released every buffer."""
        async with self._lock:
            await self._repeat(self._native.flush)
        while self._native.wants() & select.POLLERR:
            try:
                self._native.on_error_event()
            finally:
                self._take_returned()
            if self._native.wants() & select.POLLERR:
                await self._events.next()
        self._take_returned()
        self._check()

    def report(self):
        """What the sender did so far, as ``haul_io.Sender.report``."""
        return self._native.report()

    def abort(self):
        """Resets the connection, so that the kernel releases all lent buffers at once."""
        self._end()
        self._native.abort()

    def close(self):
        """Closes the sender. The kernel may still use lent buffers, which are kept until then."""
        self._end()
        self._native.close()

    def _end(self):
        """Ends everything that waits, with ``ConnectionAbortedError``."""
        if self._is_closed:
            return
        self._take_returned()
        self._is_closed = True
        self._events.close()
        loans, self._loans = self._loans, {}
        for loan in loans.values():
            _end(loan)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        self.close()


async def forward(a, b, **options):
    """Forwards between two sockets until both streams ended, in a thread of its own.

    If the task is cancelled, both connections are shut down, which ends the thread.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(set_outcome, outcome):
        if not ended.done():
            set_outcome(outcome)

    def run():
        try:
            outcome = (ended.set_result, _native.forward(a, b, **options))
        except BaseException as error:
            outcome = (ended.set_exception, error)
        try:
            loop.call_soon_threadsafe(end, *outcome)
        except RuntimeError:
            # The event loop was closed.
            pass

    threading.Thread(target=run, name="haul-forward", daemon=True).start()
    try:
        return await ended
    except asyncio.CancelledError:
        for sock in (a, b):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        raise
