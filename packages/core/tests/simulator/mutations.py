"""Faults put into the engine, each of which the simulator has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from vescale_fsdp import devices, transfers
from vescale_fsdp.dbuffer import Comm, PendingReduce
from vescale_fsdp.engine import hooks
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.placement import InnerShard
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.errors import RankMismatchError

from .scenarios import FOUR, ONE, TWO, Order, Scenario, differences

_COMPUTE_LAST: list[Order] = [("starve compute", 0), ("random", 0)]
_SIDE_LAST: list[Order] = [("starve side", 0), ("random", 0)]
_USER_LAST: list[Order] = [("starve user", 0), ("random", 0), ("random", 1)]


@dataclass
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong.
        owner, attribute, make: what to replace, and what makes the new one of the old.
        scenario: the name of the one that shows it.
        orders: in which it is run.
        others: to replace, too.
    """

    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    scenario: str = "default"
    orders: Sequence[Order] = (("random", 0), ("random", 1))
    others: Sequence[tuple[Any, str, Callable[[Any], Any]]] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, attribute, make in ((self.owner, self.attribute, self.make), *self.others):
                old = owner.__dict__[attribute]
                stack.enter_context(mock.patch.object(owner, attribute, make(old)))
            yield

    def is_found(self) -> list[str]:
        """On a rank: what the simulator says."""
        (scenario,) = [each for each in ALL if each.name == self.scenario]
        with self.applied():
            try:
                return differences(scenario, self.orders)
            except RankMismatchError as error:  # the engine itself has found it
                return [str(error)]

    @property
    def num_ranks(self) -> int:
        found = [(ONE, 1), (TWO, 2), (FOUR, 4)]
        return next(n for group, n in found if any(s.name == self.scenario for s in group))


ALL: list[Scenario] = [*ONE, *TWO, *FOUR]


def _beside_without_waiting(old: Any) -> Any:
    def start_beside(device: Any, start: Any) -> Any:
        module = devices.module_of(device)
        if module is None:
            return start()
        stream = devices.side_stream(device, "to the device")
        with module.stream(stream):
            return devices._Beside(device, stream.record_event(), start())

    return start_beside


def _event_on_the_wrong_stream(old: Any) -> Any:
    def start_beside(device: Any, start: Any) -> Any:
        module = devices.module_of(device)
        if module is None:
            return start()
        event = module.current_stream(device).record_event()
        return devices._Beside(device, event, old(device, start)._work)

    return start_beside


def _only_the_work(old: Any) -> Any:
    def wait(self: Any) -> None:
        if self._work is not None:
            self._work.wait()

    return wait


def _forget_the_gather(old: Any) -> Any:
    def wait(self: Any) -> None:
        self._work = self._part_in_flight = None

    return wait


def _wait_on_the_host(old: Any) -> Any:
    def wait(self: Any) -> None:
        old(self)
        stream = devices.current_stream(self._compute_device)
        if stream is not None:
            stream.synchronize()

    return wait


def _forget_the_reduction(old: Any) -> Any:
    def finish(self: Any, *args: Any) -> Any:
        if devices.current_stream(self.done.device) is not None:
            self.work = None
        return old(self, *args)

    return finish


def _let_go_at_issue(old: Any) -> Any:
    def start_reduce(self: Any, comm: Any) -> None:
        old(self, comm)
        if devices.has_streams(self.pool.device):
            self._reducing[0].release()

    return start_reduce


def _lane_without_waiting(old: Any) -> Any:
    class Lane(old):  # type: ignore[misc]
        def entered(self) -> Any:
            return super().entered() if self.is_current else self._module.stream(self._stream)

    return Lane


def _no_lane(old: Any) -> Any:
    return lambda self: devices._NOTHING


def _nothing(old: Any) -> Any:
    return lambda self, *args: None


def _no_join(old: Any) -> Any:
    return lambda self: None


def _users_without_waiting(old: Any) -> Any:
    def add(self: Any) -> None:
        current = devices.current_stream(self._device)
        if current is not None and current not in self._streams:
            self._streams.append(current)

    return add


def _users_forgotten(old: Any) -> Any:
    return lambda self: self._streams.clear()


def _read_at_once(old: Any) -> Any:
    return lambda self: self.value


def _source_freed(old: Any) -> Any:
    def release(self: Any) -> None:
        self._source = None

    return release


def _to_the_host_without_waiting(old: Any) -> Any:
    def moved_to_host(source: Any) -> Any:
        module = devices.module_of(source.device)
        value = devices.empty_pinned(source.shape, source.dtype)
        stream = devices.side_stream(source.device, "to the host")
        with module.stream(stream):
            value.copy_(source, non_blocking=True)
            return transfers.Arrival(value, source, stream.record_event())

    return moved_to_host


class _Late:
    """A collective that is issued when it is waited for, or by the next one."""

    def __init__(self, issue: Callable[[], Any]) -> None:
        self._issue, self._work = issue, None

    def wait(self) -> None:
        self.issue()
        assert self._work is not None
        self._work.wait()

    def issue(self) -> None:
        if self._work is None:
            self._work = self._issue()


def _other_order_on_one_rank(old: Any) -> Any:
    late: list[_Late] = []
    number = 0

    def all_gather(*args: Any) -> Any:
        nonlocal number
        if devices.module_of(args[1].device) is None or dist.get_rank() != 1:
            return old(*args)
        number += 1
        if number == 10:  # of the second step: the next is issued before it is waited for
            late.append(_Late(lambda: old(*args)))
            return late[0]
        work = old(*args)
        for each in late:
            each.issue()
        return work

    return all_gather


class _Foreign:
    """An event of another family."""


def _foreign_event(old: Any) -> Any:
    def wait_event(device: Any, event: Any) -> None:
        old(device, _Foreign())

    return wait_event


def _event_forgotten(old: Any) -> Any:
    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.post_optim_event = None
        return old(self, *args, **kwargs)

    return pre_forward


MUTATIONS = [
    Mutation(
        "the copy stream does not wait for the compute",
        devices, "start_beside", _beside_without_waiting, orders=_COMPUTE_LAST,
    ),
    Mutation(
        "the copy stream is not waited for",
        devices._Beside, "wait", _only_the_work, "one rank", _SIDE_LAST,
    ),
    Mutation(
        "the copy stream's event is recorded on the compute stream, and too early",
        devices, "start_beside", _event_on_the_wrong_stream, "one rank", _SIDE_LAST,
    ),
    Mutation("a gather is not waited for", Group, "_wait", _forget_the_gather),
    Mutation("the host waits for each gather", Group, "_wait", _wait_on_the_host),
    Mutation("a reduction is not waited for", PendingReduce, "finish", _forget_the_reduction),
    Mutation(
        "gradients are freed when their reduction is issued",
        Gradients, "start_reduce", _let_go_at_issue, orders=[("starve reduce", 0), ("random", 0)],
    ),
    Mutation(
        "collectives are issued in another order on one rank",
        Comm, "all_gather", _other_order_on_one_rank,
    ),
    Mutation(
        "a unit on another stream is freed while it runs",
        devices, "Lane", _lane_without_waiting, "branch on a stream", _USER_LAST,
        [(devices.Users, "end", _users_forgotten)],
    ),
    Mutation(
        "a unit on another stream allocates and frees there",
        devices.Lane, "entered", _no_lane, "branch on a stream", _USER_LAST,
    ),
    Mutation(
        "the second stream of a unit does not wait for its gather",
        devices.Users, "add", _users_without_waiting, "a unit on two streams", _USER_LAST,
    ),
    Mutation(
        "gradients are read before the backward's stream has them",
        devices.Lane, "join", _no_join, "steps on another stream", _COMPUTE_LAST,
    ),
    Mutation(
        "gradients of another stream are freed before they are copied",
        devices.Lane, "borrow", _nothing, "branch on a stream", _COMPUTE_LAST,
    ),
    Mutation(
        "the optimizer's event is forgotten",
        hooks, "pre_forward", _event_forgotten, "optimizer on a stream", _USER_LAST,
    ),
    Mutation(
        "the wrong family of events is waited for",
        devices, "wait_event", _foreign_event, "optimizer on a stream",
    ),
    Mutation(
        "offloaded gradients are read before they have arrived",
        transfers.Arrival, "wait", _read_at_once, "offload", _SIDE_LAST,
    ),
    Mutation(
        "offloaded gradients are copied before they are reduced",
        transfers, "moved_to_host", _to_the_host_without_waiting, "offload", _COMPUTE_LAST,
    ),
    Mutation(
        "offloaded gradients are freed on the device before they are copied",
        transfers.Arrival, "release", _source_freed, "offload", _SIDE_LAST,
    ),
    Mutation(
        "the gather over the replicas is not waited for",
        InnerShard, "wait", _no_join, "hsdp_zero1", [("random", 0)],
    ),
]  # fmt: skip
