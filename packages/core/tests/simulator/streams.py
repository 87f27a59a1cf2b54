"""Streams and events whose work is carried out later, in an order that is chosen to hurt."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

DEADLOCK_S = 4.0  # without progress
PATIENCE_S = 0.005  # of a starved stream, while collectives run that may wait for other ranks' work


class SimulationError(Exception):
    """What a device would do wrong, or never end with."""


class Event:
    """A place in a stream's queue."""

    def __init__(self, device: Device) -> None:
        self._device, self.flag = device, [True]

    def record(self, stream: Stream | None = None) -> Event:
        self.flag = [False]
        (stream or self._device.current).queue.append(("record", self.flag))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def query(self) -> bool:
        """Whether it has happened. The device goes on while the host asks again and again."""
        self._device.settle()
        if not self.flag[0] and self._device.step():
            self._device.settle()
        return self.flag[0]

    def synchronize(self) -> None:
        self._device.num_host_syncs += 1
        self._device.run_until(lambda: self.flag[0])


class Stream:
    """A queue. As a context: what is called within is queued here."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[tuple[str, Any]] = deque()
        self._before: list[Stream] = []

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event(self.device)).record(self)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise SimulationError(f"{self.name} is to wait for {event!r}, of another family")
        self.device.num_waits[self.name] = self.device.num_waits.get(self.name, 0) + 1
        self.queue.append(("wait", event.flag))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._before.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.device.current = self._before.pop()


class Collective:
    """One that waits in a queue until it is its turn, and then runs until all ranks have come.

    Args:
        run: carries it out, and returns when it has ended.
    """

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name, self._run = name, run
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def has_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except Exception as error:  # noqa: BLE001  `finish` raises it
            self._error = error

    def has_ended(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error


class Device:
    """The streams of one device, and the one that carries out what is queued.

    Args:
        policy: which stream goes on where several can: "first", "latest" (the one that was given
            work last), "random" or "starve NAME" (streams of that name only if no other can).
        seed: of "random".
        max_collectives: how many may run at a time. NCCL needs room for all that do.
        runs: whether kernels are carried out at all.
    """

    def __init__(
        self, policy: str = "random", seed: int = 0, max_collectives: int = 3, runs: bool = True
    ) -> None:
        self.policy, self._rng, self.runs = policy, random.Random(seed), runs
        self.compute = self.current = Stream(self, "compute")
        self.streams = [self.compute]
        self._max_collectives = max_collectives
        self._running: list[Collective] = []
        self._waited_for: list[Collective] = []
        self._since = 0.0
        self.num_host_syncs = 0
        self.num_kernels: dict[str, int] = {}
        self.num_waits: dict[str, int] = {}  # for events, by the stream that waits
        self.on_progress: Callable[[], None] = lambda: None

    def new_stream(self, name: str) -> Stream:
        self.streams.append(Stream(self, name))
        return self.streams[-1]

    def enqueue(self, kernel: Callable[[], None]) -> None:
        name = self.current.name
        self.num_kernels[name] = self.num_kernels.get(name, 0) + 1
        if self.runs:
            self.current.queue.append(("kernel", kernel))
            if self.current is not self.streams[-1] and self.policy == "latest":
                self.streams.remove(self.current)
                self.streams.append(self.current)

    def settle(self) -> None:
        """Take marks that need no time from the heads of queues."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                while stream.queue:
                    kind, what = stream.queue[0]
                    if kind == "record":
                        what[0] = True
                    elif not (kind == "wait" and what[0]):
                        break
                    stream.queue.popleft()
                    moved = True

    def _can_go_on(self, stream: Stream) -> bool:
        if not stream.queue:
            return False
        kind, what = stream.queue[0]
        if kind == "collective":
            if what.has_started:
                return bool(what.has_ended())
            return len(self._running) < self._max_collectives
        return bool(kind == "kernel")

    def step(self) -> bool:
        """Carry out one thing. False if nothing can be."""
        self.settle()
        ready = [stream for stream in self.streams if self._can_go_on(stream)]
        if not ready:
            return False
        stream = self._chosen(ready)
        if self._is_starved(stream) and not self._is_patient(self._running):
            return False
        kind, what = stream.queue[0]
        with _disable_current_modes(), torch.no_grad():
            if kind == "kernel":
                what()
            elif not what.has_started:
                self._running.append(what)
                what.start()
                return True
            else:
                what.finish()
                self._running.remove(what)
        stream.queue.popleft()
        return True

    def _chosen(self, ready: list[Stream]) -> Stream:
        if self.policy == "random":
            return self._rng.choice(ready)
        if self.policy == "latest":
            return ready[-1]
        return min(ready, key=self._is_starved)

    def _is_patient(self, running: list[Collective]) -> bool:
        """Whether a starved stream has let collectives end before it, for as long as it may."""
        if running and running != self._waited_for:
            self._waited_for, self._since = list(running), time.monotonic()
        return not running or time.monotonic() - self._since > PATIENCE_S

    def _is_starved(self, stream: Stream) -> bool:
        kind, _, name = self.policy.partition(" ")
        return kind == "starve" and stream.name.startswith(name)

    def run_until(self, is_done: Callable[[], bool], outside: str = "") -> None:
        """Carry out what is queued until something has happened.

        Args:
            outside: what the host waits for, if that does not come from this device.

        Raises:
            SimulationError: it cannot happen any more.
        """
        last = time.monotonic()
        while not is_done():
            if self.step():
                last = time.monotonic()
            elif is_done():
                return
            elif time.monotonic() - last > (DEADLOCK_S if self._running or outside else 0):
                waits = f"the host waits {outside}; " if outside else ""
                raise SimulationError(f"deadlock: {waits}{self.describe()}")
            else:
                time.sleep(0.0005)

    def run_what_can(self) -> None:
        """While the host waits for something else, the device goes on."""
        while self.step():
            pass

    def synchronize(self, *_: object) -> None:
        self.run_until(lambda: self.settle() or not any(s.queue for s in self.streams))

    def describe(self) -> str:
        """What runs and what waits, for errors."""
        running = [each.name for each in self._running] or "nothing"
        queues = {s.name: (s.queue[0][0], len(s.queue)) for s in self.streams if s.queue}
        return f"collectives that run: {running}; first and number of what waits: {queues}"
