"""What a flattened optimizer steps on: how many tensors, and which memory it leaves alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

from .helpers import backward, local, long_from, make_adamw, make_net, storage_of, train


class Kernels(TorchDispatchMode):
    """Counts the calls of AdamW's last operator, and their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::addcdiv_":
            self.sizes.append(local(args[0]).numel())
        return func(*args, **(kwargs or {}))


def sizes_of_step(net: nn.Module, optimizer: Optimizer) -> list[int]:
    """Of the tensors that an optimizer steps on, in elements, in ascending order."""
    optimizer.zero_grad()
    backward(net, 9)
    with Kernels() as kernels:
        optimizer.step()
    return sorted(kernels.sizes)


def step_sizes(num_long: int) -> list[list[int]]:
    net = make_net()
    plain, flat = make_adamw(net), flatten_(make_adamw(net))
    train(net, plain, range(1))
    train(net, flat, range(1))
    with long_from(num_long):
        sizes = [sizes_of_step(net, optimizer) for optimizer in (plain, flat)]
        train(net, flat, range(1), skip=(0,))  # a layer in the middle lags behind
        return [*sizes, sizes_of_step(net, flat)]


# first: weight 35, bias 7; middle: three of weight 64, bias 8; last: weight 24, bias 3; scale 1.
# On one rank there are no cuts, and a unit lies in its buffer in the order of definition.
PLAIN = sorted([35, 7, *[64, 8] * 3, 24, 3, 1])


def test_all_short_segments_are_one_tensor() -> None:
    plain, flat, lagging = run_ranks(step_sizes, 1, 10**6)[0]
    assert plain == PLAIN
    assert flat == [sum(PLAIN)]
    # The states lie in the order of addresses, and what lags behind is in the middle of its unit.
    assert len(lagging) == 3
    assert 72 in lagging
    assert sum(lagging) == sum(PLAIN)


def test_long_segments_end_where_a_gap_begins() -> None:
    # In fp32 tensors start at multiples of 8 elements: 35 ends before its next, and so do 7 and 3.
    _, flat, lagging = run_ranks(step_sizes, 1, 1)[0]
    assert flat == sorted([35, 7, 3 * 72, 24 + 3, 1])
    assert lagging == sorted([35, 7, 72, 72, 72, 24 + 3, 1])


def train_with_two(flatten: Any) -> tuple[nn.Module, list[Optimizer]]:
    """Two optimizers share the shards: of weights and, between them, of biases."""
    net = make_net()
    weights = [param for name, param in net.named_parameters() if "weight" in name]
    biases = [param for name, param in net.named_parameters() if "bias" in name]
    # Without eps an element whose gradient is zero becomes NaN: a gap that is stepped on shows.
    optimizers = [AdamW(weights, lr=0.1, eps=0.0), SGD(biases, lr=0.1, momentum=0.9)]
    for step in range(4):
        backward(net, step)
        for optimizer in map(flatten, optimizers):
            optimizer.step()
        net.zero_grad()
    return net, optimizers


def check_neighbours() -> None:
    plain, others = train_with_two(lambda optimizer: optimizer)
    for num_long in (1, 50, 10**6):
        with long_from(num_long):
            net, optimizers = train_with_two(flatten_)
        for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(storage_of(param), storage_of(expected))
        assert not storage_of(net.first.weight).isnan().any()
        assert [len(o.state) for o in optimizers] == [len(o.state) for o in others]


def test_gaps_and_parameters_of_others_are_not_touched() -> None:
    run_ranks(check_neighbours, 2)


def step_on_neighbours_in_memory() -> tuple[list[int], Tensor]:
    """Two parameters whose addresses follow each other in storages of their own."""
    mesh = dist.init_device_mesh("cpu", (1,))
    spec: dict[str, Any] = {"placements": [RaggedShard((0,), (1,))], "shape": (4,)}
    memory, gradients = torch.ones(8).numpy(), torch.ones(8).numpy()
    params = []
    for part, grad in ((memory[:4], gradients[:4]), (memory[4:], gradients[4:])):
        tensors = [torch.from_numpy(each) for each in (part, grad)]
        assert all(tensor.untyped_storage().nbytes() == 16 for tensor in tensors)
        param, gradient = (RaggedTensor.from_local(each, mesh, **spec) for each in tensors)
        params.append(nn.Parameter(param))
        params[-1].grad = gradient
    optimizer = flatten_(AdamW(params, lr=0.5, weight_decay=0.0))
    with long_from(1):
        optimizer.step()
        with Kernels() as kernels:
            optimizer.step()
    return kernels.sizes, torch.from_numpy(memory)


def test_neighbours_in_memory_of_different_storages_are_stepped_apart() -> None:
    ((sizes, memory),) = run_ranks(step_on_neighbours_in_memory, 1)
    assert sizes == [4, 4]
    torch.testing.assert_close(memory, torch.zeros(8), rtol=0, atol=1e-6)  # 1 - 0.5 - 0.5


def where_states_lie() -> None:
    net = make_net()
    optimizer = flatten_(make_adamw(net))
    train(net, optimizer, range(2))
    states = [optimizer.state[param] for param in net.parameters() if param.grad is not None]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        storages = {local(state[name]).untyped_storage().data_ptr() for state in states}
        assert len(storages) == 1, name
    sizes = [local(param).numel() for param in net.parameters() if param.grad is not None]
    storage = local(states[0]["exp_avg"]).untyped_storage()
    assert storage.nbytes() == 4 * sum(sizes)  # no gaps
    assert {type(state["exp_avg"]) for state in states} == {RaggedTensor}
    assert [state["step"].item() for state in states] == [2.0] * len(states)


def test_states_are_views_of_flat_tensors() -> None:
    run_ranks(where_states_lie, 2)
