"""A network of a given speed on one machine: a namespace per rank, connected by a switch.

    python -m benchmarks.slow_network --ranks 2 --rate 1gbit -- python train.py

This checks the limit, runs the command once per rank with the environment of ``torchrun``, and
prints the bytes that each rank sent. It needs Linux, root and iproute2. TCP's congestion control is
Reno, independent of the system's setting.

::

    rank 0 [wire]---[port0]   [port1]---[wire] rank 1
       |                |  switch |        |
       |                +---------+        limits what rank 1 sends
       limits what      limit what ranks
       rank 0 sends     0 and 1 receive

How namespaces and the switch are made: `namespaces`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import namespaces
from benchmarks.namespaces import die_with_parent

__all__ = ["Network", "Place", "bits_per_s", "counted_network", "die_with_parent", "why_not"]

_CLONE_NEWNET = 0x40000000
_PORT = 29400
_CHECK_S = 0.8  # duration of the transfer that checks the limit; the second half is measured
# The queue of a limit has the data of 20 ms, as the buffer of a small switch. A burst is two of the
# largest packets that the kernel sends as one.
_LATENCY, _BURST = "20ms", "128kb"
# Reno slows down when a full queue drops packets, as CUBIC does, and every kernel has it. The
# system's default may behave differently: with BBR, two streams of a rank share a limit unevenly,
# and a step of moe-10m on 4 ranks varies by 10%.
_CONGESTION_CONTROL = "reno"
_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """The namespace of a rank, and the values for its environment."""

    namespace: str  # a path
    interface: str
    address: str  # of rank 0

    def enter(self) -> None:
        """Move this process into the namespace, permanently. It must have only one thread."""
        _set_namespace(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


class Network:
    """The network of `counted_network`. Use it only inside of the ``with`` block."""

    def __init__(self, places: list[Place], rate: str | None) -> None:
        self.places = places
        self.rate = rate

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each rank has sent so far; over loopback, all ranks together.

        Headers of packets are included, as the kernel sends them: about 0.1% for packets of 64 kB,
        4.6% for packets of 1,500 bytes.
        """
        paths = list(dict.fromkeys(place.namespace for place in self.places))
        return [_in_namespace(path, lambda: _sent(self.places[0].interface)) for path in paths]

    @contextmanager
    def sampled(self, period_s: float = 0.001) -> Iterator[list[tuple[float, int]]]:
        """A context that samples the bytes that rank 0 has sent. Yields a list of (time, bytes)."""
        samples: list[tuple[float, int]] = []
        stop = threading.Event()

        def sample() -> None:
            _set_namespace(self.places[0].namespace)
            while not stop.wait(period_s):
                samples.append((time.perf_counter(), _sent(self.places[0].interface)))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield samples
        finally:
            stop.set()
            thread.join()

    def measure(self) -> list[float]:
        """Measure the bits per second that each rank can send to the next, all at the same time."""
        assert self.rate is not None, "loopback has no limit to measure"
        num_bytes = int(bits_per_s(self.rate) * _CHECK_S / 8)
        links = []
        for rank, receiver in enumerate(self.places):
            address = (f"10.0.0.{rank + 1}", _PORT)
            listen = functools.partial(socket.create_server, address)
            connect = functools.partial(socket.create_connection, address, timeout=10)
            server = _in_namespace(receiver.namespace, listen)
            client = _in_namespace(self.places[rank - 1].namespace, connect)
            links.append((client, server.accept()[0]))
            server.close()
        return _transfer(links, num_bytes)

    def check(self) -> list[float]:
        """Call `measure`, and raise if a rank is faster than the limit. It may be slower.

        Raises:
            RuntimeError: a rank receives more than 5% faster than the limit.
        """
        assert self.rate is not None, "loopback has no limit to check"
        found = self.measure()
        if max(found) > 1.05 * bits_per_s(self.rate):
            speeds = ", ".join(f"{speed / 1e6:.0f}" for speed in found)
            raise RuntimeError(f"the limit is {self.rate}, but ranks receive {speeds} Mbit/s")
        return found


def why_not() -> str | None:
    """Return why networks cannot be made on this system. None: they can."""
    return namespaces.why_not("tc")


@contextmanager
def counted_network(num_ranks: int, rate: str | None) -> Iterator[Network]:
    """Make a network for these ranks only, so that its counters count only them.

    Args:
        num_ranks: number of ranks.
        rate: of each rank in each direction, in the form of ``tc``: ``1gbit``, ``500mbit``. None:
            no limit; all ranks are in one namespace and use loopback.
    """
    with ExitStack() as stack:
        if rate is None:
            inside = stack.enter_context(namespaces.holder())
            namespaces.run(inside, "ip link set lo up")
            place = Place(f"/proc/{inside}/ns/net", "lo", "127.0.0.1")
            yield Network([place] * num_ranks, None)
            return
        switch = stack.enter_context(namespaces.new_switch())
        places = []
        for rank in range(num_ranks):
            inside = stack.enter_context(namespaces.holder())
            port = switch.connect(rank, inside)
            for where, interface in ((inside, namespaces.WIRE), (switch.inside, port)):
                limit = f"tbf rate {rate} burst {_BURST} latency {_LATENCY}"
                namespaces.run(where, f"tc qdisc add dev {interface} root {limit}")
            namespace = f"/proc/{inside}/ns/net"
            choose = functools.partial(_CONGESTION_FILE.write_text, _CONGESTION_CONTROL)
            _in_namespace(namespace, choose)
            places.append(Place(namespace, namespaces.WIRE, "10.0.0.1"))
        yield Network(places, rate)


def _set_namespace(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")


def _in_namespace(path: str, function: Callable[[], Result]) -> Result:
    """Call a function in a thread that has entered a namespace. Namespaces belong to threads."""
    results: list[Any] = []

    def run() -> None:
        try:
            _set_namespace(path)
            results.append((function(), None))
        except Exception as error:  # noqa: BLE001  # raised again in the caller's thread
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = results[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _sent(interface: str) -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise OSError(f"no network interface {interface}")


def _transfer(links: Sequence[tuple[socket.socket, socket.socket]], num_bytes: int) -> list[float]:
    """Measure bits per second over each link in the second half, when TCP has reached its speed."""
    speeds = [0.0] * len(links)

    def receive(index: int, connection: socket.socket) -> None:
        connection.settimeout(60)
        buffer = bytearray(1 << 20)
        received = first = 0
        started = time.perf_counter()
        while received < num_bytes:
            received += connection.recv_into(buffer)
            if not first and received >= num_bytes // 2:
                started, first = time.perf_counter(), received
        speeds[index] = 8 * (received - first) / (time.perf_counter() - started)

    threads = []
    for index, (sender, receiver) in enumerate(links):
        threads.append(threading.Thread(target=receive, args=(index, receiver)))
        threads.append(threading.Thread(target=sender.sendall, args=(bytes(num_bytes),)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links:
        for end in link:
            end.close()
    return speeds


def bits_per_s(rate: str) -> float:
    """``"1gbit"`` is 1e9."""
    match = re.fullmatch(r"([0-9.]+)(k|m|g)bit", rate)
    if match is None:
        raise ValueError(f"a rate is a number with kbit, mbit or gbit, as 1gbit, got {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def run_in(network: Network, command: list[str]) -> int:
    """Run a command on every rank. If one fails, end all. Returns its exit code, else 0."""
    processes = []
    for rank, place in enumerate(network.places):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(network.places)),
            "LOCAL_WORLD_SIZE": str(len(network.places)),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(_PORT + 1),
            "GLOO_SOCKET_IFNAME": place.interface,
        }
        call = ["nsenter", f"--net={place.namespace}", "setpriv", "--pdeathsig", "KILL", *command]
        processes.append(subprocess.Popen(call, env={**os.environ, **environ}))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        return next((process.returncode for process in processes if process.poll()), 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Make the network, check it, and run the command in it. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Run ranks on a network of a given speed.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="in each direction: 1gbit, 500mbit, ...")
    parser.add_argument("command", nargs="*", help="after --; without one, only check the limit")
    args = parser.parse_args()
    if reason := why_not():
        print(f"no networks can be made here: {reason}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with counted_network(args.ranks, args.rate) as network:
        for rank, speed in enumerate(network.check()):
            print(f"rank {rank} receives {speed / 1e6:.0f} Mbit/s, limit {args.rate}", flush=True)
        if not args.command:
            return 0
        before = network.sent_bytes()
        code = run_in(network, args.command)
        for rank, (a, b) in enumerate(zip(before, network.sent_bytes(), strict=True)):
            print(f"rank {rank} sent {(b - a) / 1e6:.2f} MB")
    return code


if __name__ == "__main__":
    sys.exit(main())
