"""An object of Ray from one node to another node on the same host, to compare with weights.py.

    pip install ray numpy
    python weights_ray.py [GIB] [TIMES]
"""

import sys
import time

import numpy
import ray
from ray.cluster_utils import Cluster


def busy_seconds():
    """The CPU time of the machine that was not idle, interrupts included."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / 100


def main(gib="1", times="5"):
    length = int(float(gib) * (1 << 30))
    store = int(1.3 * length) + (1 << 30)
    cluster = Cluster()
    cluster.add_node(num_cpus=1, object_store_memory=store)
    cluster.add_node(num_cpus=1, object_store_memory=store, resources={"peer": 1})
    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote(num_cpus=0, resources={"peer": 1})
    def weights():
        return numpy.arange(length, dtype=numpy.uint64).astype(numpy.uint8)

    for _ in range(int(times)):
        reference = weights.remote()
        ray.wait([reference], fetch_local=False, timeout=120)
        time.sleep(1)
        busy, begin = busy_seconds(), time.monotonic()
        array = ray.get(reference, timeout=120)
        seconds, busy = time.monotonic() - begin, busy_seconds() - busy
        assert array[-1] == (length - 1) % 256
        gib = length / (1 << 30)
        rate, cost = gib / seconds, busy / gib
        print(f"ray: {rate:.2f} GiB/s, {cost:.2f} s of CPU of the machine for each GiB", flush=True)
        del array, reference
        time.sleep(1)


main(*sys.argv[1:])
