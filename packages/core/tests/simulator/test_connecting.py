"""NCCL connects before the first pass, by all that a pass sends, so that no host is kept in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.engine import connecting
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

from .scenarios import NATIVE
from .simulator import Simulator, simulated
from .streams import SimulationError
from .test_simulator import named

AS_NCCL = mock.patch.object(connecting, "connects_late", return_value=True)
LEFT_OUT = named("a rank leaves out a unit")[0]


def one_element(units: Iterable[Any], comm_of: Callable[[Any], Any], **_: Any) -> None:
    """One collective of each kind, as short as can be."""
    for comm in {id(comm): comm for u in units for comm in map(comm_of, u.groups)}.values():
        own, all_of_them = torch.zeros(1), torch.zeros(comm.size)
        collectives.all_gather_single(all_of_them, own, comm.gather_group).wait()
        op, group = dist.ReduceOp.SUM, comm.reduce_group
        collectives.reduce_scatter_single(own, all_of_them, op, group).wait()
        collectives.all_reduce(own, group).wait()


def trained(connect: Callable[..., None]) -> str:
    """What a training says whose host is kept by what is new; "" if it ends with the right bits."""
    with NATIVE:
        expected = LEFT_OUT.run()
        with (
            AS_NCCL,
            mock.patch.object(connecting, "connect", connect),
            simulated("first", blocks=True) as simulator,
        ):
            try:
                found = LEFT_OUT.run(simulator)
                simulator.device.synchronize()
            except SimulationError as error:
                return str(error)
    pairs = zip(found, expected, strict=True)
    return "" if all(torch.equal(value, right) for value, right in pairs) else "other bits"


def test_two_hosts_wait_for_each_other_if_only_short_messages_were_sent() -> None:
    left_out, other = run_ranks(trained, 2, one_element)
    assert "deadlock: the host waits to connect, in reduce_scatter_single" in left_out
    assert "deadlock: collectives that run: ['all_gather_single" in other.replace('"', "'")


def test_none_waits_if_what_a_pass_sends_was_sent_before() -> None:
    assert run_ranks(trained, 2, connecting.connect) == ["", ""]


def sent(name: str) -> tuple[set[str], set[str], int]:
    """A training's collectives with sizes: before the first pass, and all; number of the former."""
    before: list[str] = []
    seen: list[str] = []

    def note(self: Simulator, name: str, group: dist.ProcessGroup, num_bytes: int) -> None:
        seen.append(f"{name} of {num_bytes} bytes over {dist.get_process_group_ranks(group)}")

    original = connecting.connect

    def connect(*args: Any, **options: Any) -> None:
        original(*args, **options)
        before.extend(seen)

    with NATIVE:
        named(name)[0].run()  # DTensor remembers how it shards operators
    with (
        NATIVE,
        AS_NCCL,
        mock.patch.object(Simulator, "_connect", note),
        mock.patch.object(connecting, "connect", connect),
        simulated("first") as simulator,
    ):
        named(name)[0].run(simulator)
        simulator.device.synchronize()
    return set(before), set(seen), len(before)


@pytest.mark.parametrize(
    ("name", "num_before"),
    [
        # Four equal layers, and no parameters of the root: a gather, a reduction, the flags.
        ("default", 3),
        ("zero1", 3),
        ("frozen and unused", 4),  # the frozen layer is only gathered
        ("quantized", 3),
        ("Shard(1)", 3),  # several buffers are one operation
        ("hsdp", 5),  # the sum over the replicas, and their flags
        ("hsdp_zero1", 6),  # and a gather over them
        ("parts of 2", 4),  # and that of the parts
    ],
)
def test_all_that_a_training_sends_was_sent_before_its_first_pass(
    name: str, num_before: int
) -> None:
    for before, all_of_them, number in run_ranks(sent, named(name)[1], name):
        assert all_of_them <= before
        assert number == num_before
