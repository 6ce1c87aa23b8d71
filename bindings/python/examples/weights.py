"""The weights of a model from one host to another, over plain TCP into preallocated memory.

    python weights.py serve PORT [GIB]
    python weights.py fetch HOST PORT [haul|recv_into]

The server has the weights in a file, as a checkpoint is, and sends the file without a copy. The
client allocates a numpy array of the announced size, receives into the array, and prints the rate
and its CPU time for each GiB. With ``recv_into`` the client uses ``socket.recv_into`` instead, for
a comparison. A torch tensor on the CPU works as well: pass ``tensor.numpy()``.
"""

import socket
import struct
import sys
import tempfile
import time

import haul_io

HEAD = struct.Struct("<Q")


def congestion(sock):
    """Another default congestion control, such as BBR, paces, which costs CPU time."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return sock


def serve(port, gib="1"):
    length = int(float(gib) * (1 << 30))
    with tempfile.TemporaryFile() as weights, congestion(socket.socket()) as listener:
        block = bytes(range(256)) * 4096
        for _ in range(length // len(block)):
            weights.write(block)
        weights.flush()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", int(port)))
        listener.listen()
        print(f"serving {length} bytes at port {listener.getsockname()[1]}", flush=True)
        while True:
            sock, _ = listener.accept()
            with sock, haul_io.Sender(sock) as sender:
                try:
                    sender.send_file(weights, head=HEAD.pack(length), count=length)
                except OSError as error:
                    print(f"a client left: {error}", flush=True)


def fetch(host, port, way="haul"):
    import numpy

    with congestion(socket.socket()) as sock:
        sock.connect((host, int(port)))
        (length,) = HEAD.unpack(sock.recv(HEAD.size, socket.MSG_WAITALL))
        weights = numpy.empty(length, dtype=numpy.uint8)
        # The pages of the array exist before the measurement begins.
        weights[:: 4096] = 0
        cpu, begin = time.process_time(), time.monotonic()
        if way == "haul":
            with haul_io.Receiver(sock) as receiver:
                receiver.receive_exactly_into(weights)
        else:
            view, received = memoryview(weights), 0
            while received < length:
                count = sock.recv_into(view[received:])
                if count == 0:
                    raise EOFError(f"the stream ended after {received} of {length} bytes")
                received += count
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    block = numpy.arange(length, dtype=numpy.uint64).astype(numpy.uint8)
    assert numpy.array_equal(weights, block), "the weights are damaged"
    gib = length / (1 << 30)
    print(f"{way}: {gib / seconds:.2f} GiB/s, {cpu / gib:.3f} s of CPU for each GiB")


if __name__ == "__main__":
    {"serve": serve, "fetch": fetch}[sys.argv[1]](*sys.argv[2:])
