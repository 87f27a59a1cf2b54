"""What a GPU would do wrong, found on the CPU (docs/design/cuda.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_fsdp.testing import run_ranks

from .memory import Allocator
from .scenarios import FEW, FOUR, MORE, NATIVE, ONE, ORDERS, TWO, Scenario, differences
from .simulator import Simulator, simulated
from .streams import SimulationError

TIMEOUT_S = 100
# Scenarios at each change, one of each mechanism, and those that find a mutation (tests/mutations);
# the others, with what these combine: nightly.
AT_EACH_CHANGE = {
    *("default", "zero1", "checkpointing", "hsdp", "optimizer on a stream", "quantized"),
    *("one rank", "branch on a stream", "a unit on two streams", "backward on another stream"),
    *("offload", "hsdp_zero1", "Shard(1)", "first step on another stream"),
    "zero1, first micro-batch on another stream",
}
COPIES_LAST = ORDERS[3]
MORE_ORDERS = [ORDERS[0], COPIES_LAST, *MORE]  # for all scenarios: nightly
WITH_COPIES_LAST = {"offload"}  # at each change: it frees what is being copied
GROUPS = {1: ONE, 2: TWO, 4: FOUR}


def named(name: str) -> tuple[Scenario, int]:
    """A scenario, and the number of ranks that it is for."""
    return next((each, n) for n, group in GROUPS.items() for each in group if each.name == name)


def check_scenario(name: str, all_orders: bool) -> list[str]:
    scenario, num_ranks = named(name)
    if not all_orders:
        orders = [each for each in scenario.orders if each not in MORE_ORDERS]
        return differences(scenario, orders + [COPIES_LAST] * (name in WITH_COPIES_LAST))
    return differences(scenario, FEW if num_ranks > 2 else None)


@pytest.mark.parametrize(
    "all_orders", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["few", "all"]
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=[] if each.name in AT_EACH_CHANGE else [pytest.mark.nightly])
        for group in GROUPS.values()
        for each in group
    ],
)
def test_each_order_gives_the_bits_of_the_eager_run(name: str, all_orders: bool) -> None:
    num_ranks = named(name)[1]
    found = run_ranks(check_scenario, num_ranks, name, all_orders, timeout_s=TIMEOUT_S)
    assert not any(found), found


def check_number_of_collectives() -> dict[str, int]:
    """Of a training whose 4 units, beside the root, have two buffers each."""
    scenario = named("Shard(1)")[0]
    with NATIVE:
        scenario.run()  # DTensor remembers how it shards operators
    with simulated() as simulator:
        scenario.run(simulator)
        simulator.device.synchronize()
        return simulator.num_collectives


def test_a_unit_of_several_buffers_is_one_operation_each_way() -> None:
    for found in run_ranks(check_number_of_collectives, 2, timeout_s=TIMEOUT_S):
        assert found["all_gather_many"] == 3 * (4 + 4)  # forward and backward of three steps
        assert found["reduce_scatter_many"] >= 2 * 4  # the first records, group by group
        assert "all_gather_single" not in found


# The simulator itself


def double(x: Tensor, simulator: Simulator, waits: bool) -> Tensor:
    """On another stream: 2 x + 1, of which the addition is on the current one."""
    side, compute = simulator.device.new_stream("side"), simulator.device.compute
    side.wait_stream(compute)
    with side:
        y = x * 2
    if waits:
        compute.wait_stream(side)
    return y + 1


@pytest.mark.parametrize("policy", ["first", "latest", "random", "starve side", "starve compute"])
def test_who_waits_gets_the_number(policy: str) -> None:
    with simulated(policy) as simulator:
        with simulator:
            y = double(torch.full((4,), 3.0), simulator, waits=True)
        assert simulator.value(y).tolist() == [7.0] * 4


def test_who_does_not_wait_gets_what_was_there() -> None:
    with simulated("starve side") as simulator:
        with simulator:
            y = double(torch.full((4,), 3.0), simulator, waits=False)
        assert 7.0 not in simulator.value(y).tolist()


def test_memory_is_reused_at_once_by_its_stream_and_by_no_other() -> None:
    with simulated() as simulator, simulator:
        x = torch.ones(4)
        first = simulator._blocks[x.untyped_storage()._cdata].offset
        del x
        with simulator.device.new_stream("side"):
            other = torch.ones(4)
        x = torch.ones(4)
        offsets = [simulator._blocks[t.untyped_storage()._cdata].offset for t in (x, other)]
        assert offsets[0] == first
        assert offsets[1] != first


def test_a_recorded_stream_keeps_memory_until_it_is_through() -> None:
    with simulated("starve side") as simulator:
        side = simulator.device.new_stream("side")
        with simulator:
            x = torch.ones(4)
            side.wait_stream(simulator.device.compute)
            with side:
                y = x * 2
            x.record_stream(side)  # type: ignore[arg-type]
            del x
            z = torch.zeros(4)
        assert simulator.value(y).tolist() == [2.0] * 4
        assert simulator.value(z).tolist() == [0.0] * 4


def test_the_host_is_seen_to_wait() -> None:
    with simulated() as simulator, simulator:
        assert (torch.ones(2) + 1).sum().item() == 4.0
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
        assert simulator.device.num_host_syncs == 2


def test_an_event_that_never_comes_is_a_deadlock() -> None:
    with simulated() as simulator:
        simulator.device.current.queue.append(("wait", [False]))
        with pytest.raises(SimulationError, match=r"deadlock: .*compute.*wait"):
            simulator.device.synchronize()


def test_an_event_of_another_family_is_refused() -> None:
    with simulated() as simulator, pytest.raises(SimulationError, match="another family"):
        simulator.device.current.wait_event(torch.Event("cpu"))  # type: ignore[arg-type]


def test_a_kernel_takes_no_tensor_of_the_host() -> None:
    with simulated() as simulator, simulator:
        host = simulator.empty_on_host((2,), torch.float32)
        with pytest.raises(SimulationError, match="on the host and on the device"):
            torch.ones(2) + host


def test_the_allocator_cuts_and_joins_as_c10_does() -> None:
    allocator, stream = Allocator(1 << 40, as_cuda=True), "compute"
    small = [allocator.take(1000, stream) for _ in range(3)]
    assert [block.size for block in small] == [1024] * 3
    assert allocator.reserved == 2 << 20
    for block in small:
        allocator.give(block)
    assert allocator.take(512, stream).offset == small[0].offset
    middle = allocator.take(5 << 20, stream)
    assert allocator.reserved == (2 << 20) + (20 << 20)
    allocator.give(middle)
    assert allocator.take(20 << 20, stream).offset == middle.offset  # the segment is whole
    allocator.take(33 << 20, stream)
    assert allocator.reserved == (2 << 20) + (20 << 20) + (34 << 20)
    assert allocator.take(1000, "another").offset >= 56 << 20
    assert allocator.peak_allocated == allocator.allocated
