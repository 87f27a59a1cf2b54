"""check_gradients: one verdict on all ranks about NaN and infinity, and what follows from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import NonFiniteError, fully_shard
from vescale_fsdp.engine import check_gradients, finite
from vescale_fsdp.ranks import Ranks
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, full_gradients, full_parameters, shard_units
from .models import MLP, OddParameters, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .recorders import Recorder
from .test_tensor_parallel import batch, parallelized


def sharded_gpt() -> nn.Module:
    model = make(TinyGPT)
    return shard_units(model, model.blocks)


def backward(model: nn.Module, step: int = 0) -> nn.Module:
    gpt_loss(model, tokens_of(step, dist.get_rank())).backward()
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def spoil(model: nn.Module, name: str, value: float, rank: int) -> None:
    """Write ``value`` over the last element that ``rank`` holds of a gradient."""
    if dist.get_rank() == rank:
        with torch.no_grad():
            local(dict(model.named_parameters())[name].grad).view(-1)[-1] = value


def holders(model: nn.Module, name: str) -> list[int]:
    """The ranks that hold a part of a parameter."""
    held = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    held[dist.get_rank()] = local(dict(model.named_parameters())[name]).numel()
    dist.all_reduce(held)
    return held.nonzero().view(-1).tolist()


def holder(model: nn.Module, name: str) -> int:
    return holders(model, name)[0]


# The three policies


def check_finite() -> None:
    model = backward(sharded_gpt())
    before = full_gradients(model)
    for policy in ("raise", "skip", "ignore"):
        assert check_gradients(model, policy) is True
    assert_bit_equal(full_gradients(model), before)


def test_finite_gradients_pass_and_stay_as_they_are() -> None:
    run_ranks(check_finite, 2)


def check_raise(value: float, kind: str) -> None:
    model = backward(sharded_gpt())
    weights = full_parameters(model)
    name = "blocks.1.up.bias"
    rank = holder(model, name)
    spoil(model, name, value, rank)
    before = full_gradients(model)
    text = f"gradients of 1 parameter are not finite: {name!r} has {kind} on rank {rank}. "
    with pytest.raises(NonFiniteError) as caught:
        check_gradients(model)
    assert str(caught.value).startswith(text)
    assert_bit_equal(full_parameters(model), weights)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf")]
)
def test_raise_names_parameter_and_rank_on_every_rank(value: float, kind: str) -> None:
    run_ranks(check_raise, 2, value, kind)


def check_nan_in_the_batch_of_one_rank() -> None:
    model = shard_units(make(MLP), [])
    weights = full_parameters(model)
    x = inputs_of(0, dist.get_rank())
    if dist.get_rank() == 1:
        x[0, 0] = math.nan
    model(x).sum().backward()
    with pytest.raises(NonFiniteError, match="gradients of 6 parameters are not finite"):
        check_gradients(model, "raise")
    assert check_gradients(model, "skip") is False
    assert_bit_equal(full_parameters(model), weights)
    assert check_gradients(model, "raise") is True  # there are none left


def test_nan_in_the_batch_of_one_rank_is_found_on_all() -> None:
    run_ranks(check_nan_in_the_batch_of_one_rank, 2)


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": local(value).clone()
        for index, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def check_skip(name: str, options: dict[str, Any]) -> None:
    model = sharded_gpt()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        if step == 1:
            spoil(model, "norm.weight", math.nan, holder(model, "norm.weight"))
            assert check_gradients(model, "skip") is False
            assert all(gradient is None for gradient in full_gradients(model).values())
            weights, states = full_parameters(model), states_of(optimizer)
            assert any(state.any() for state in states.values()), "nothing that could move"
        optimizer.step()  # what the caller leaves out; of torch's optimizers it is harmless
    assert_bit_equal(full_parameters(model), weights)
    assert_bit_equal(states_of(optimizer), states)


@pytest.mark.parametrize("mode", ["foreach", "fused", "neither"])
@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9})])
def test_after_skip_a_step_moves_nothing(name: str, options: dict[str, Any], mode: str) -> None:
    flags = {"foreach": mode == "foreach", "fused": mode == "fused"}
    run_ranks(check_skip, 2, name, {**options, **flags})


def trained(steps: list[int], bad: int | None = None) -> nn.Module:
    """Trained on the batches of these steps, with a NaN in the gradients of one."""
    model = sharded_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        if step == bad:
            spoil(model, "blocks.0.qkv.weight", math.inf, holder(model, "blocks.0.qkv.weight"))
        if check_gradients(model, "skip"):
            optimizer.step()
    return model


def check_training_goes_on() -> None:
    assert_bit_equal(full_parameters(trained([0, 1, 2], bad=1)), full_parameters(trained([0, 2])))


def test_a_skipped_step_leaves_no_trace() -> None:
    run_ranks(check_training_goes_on, 2)


def check_skip_drops_what_waits(part: str) -> None:
    model, other = (shard_units(make(MLP), []) for _ in range(2))
    rank = dist.get_rank()
    model(inputs_of(0, rank)).sum().backward()
    spoil(model, "layers.0.weight", math.nan, 0)
    model.set_requires_gradient_sync(False)
    model(inputs_of(1, rank)).sum().backward()
    assert check_gradients(model.get_submodule(part), "skip") is False
    model.set_requires_gradient_sync(True)
    for each in (model, other):
        each(inputs_of(2, rank)).sum().backward()
    expected = full_gradients(other)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, expected[name]) == name.startswith(part), name


@pytest.mark.parametrize("part", ["", "layers.0"])
def test_skip_drops_gradients_that_wait_for_the_last_micro_batch(part: str) -> None:
    run_ranks(check_skip_drops_what_waits, 2, part)


def check_ignore() -> None:
    model = backward(sharded_gpt())
    spoil(model, "norm.weight", math.nan, holder(model, "norm.weight"))
    if dist.get_rank() == 0:  # alone: it must not wait for anybody
        with Recorder() as recorder:
            assert check_gradients(model, "ignore") is True
        assert recorder.num_operators == 0


def test_ignore_does_not_look() -> None:
    run_ranks(check_ignore, 2, timeout_s=10)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="one of raise, skip, ignore, got 'warn'"):
        check_gradients(nn.Linear(1, 1), "warn")  # type: ignore[arg-type]


# What it costs


class Reads(TorchDispatchMode):
    """How many elements each sum has read."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.sum, torch.ops.aten.linalg_vector_norm):
            self.sums.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def refuse(*_: object) -> None:
    raise AssertionError("names are exchanged only if something is not finite")


def check_cost() -> list[int]:
    model = backward(sharded_gpt())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", refuse)
        with Recorder() as recorder:
            assert check_gradients(model)
        with Reads() as reads:
            assert check_gradients(model)
    assert [event.name for event in recorder.events] == ["allreduce_"]
    held = sum(local(p).numel() for p in model.parameters())
    assert held <= sum(reads.sums) <= 1.1 * held
    return reads.sums


def test_finite_gradients_cost_one_sum_a_unit_and_one_all_reduce() -> None:
    assert [len(sums) for sums in run_ranks(check_cost, 2)] == [3, 3]  # two blocks and the root


# Meshes


def check_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make(MLP)
    shard_units(model, model.layers, mesh=mesh)
    name = "layers.0.weight"
    where = holders(model, name)
    assert len(where) in (2, 4)  # 0 and 2, 1 and 3, or all
    for rank in where:
        model.zero_grad()
        model(inputs_of(0, dist.get_rank())).sum().backward()
        assert check_gradients(model)
        spoil(model, name, math.nan, rank)
        with pytest.raises(NonFiniteError, match=f"'{name}' has NaN on rank {rank}\\."):
            check_gradients(model)
        assert check_gradients(model, "skip") is False


def test_nan_in_one_replica_alone_is_found_on_all_ranks() -> None:
    run_ranks(check_replicas, 4)


def check_meshes(covering: bool) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    other = init_device_mesh("cpu", (4,)) if covering else grid["rows"]
    model = make(MLP)
    fully_shard(model.layers[0], mesh=grid["columns"])  # as experts are: ranks 0, 1 and 2, 3
    fully_shard(model.layers[1], mesh=other)  # all, or ranks 0, 2 and 1, 3
    fully_shard(model, mesh=other)
    for name in ("layers.0.weight", "layers.1.weight"):
        for rank in (holders(model, name)[0], holders(model, name)[-1]):
            model(inputs_of(0, dist.get_rank())).sum().backward()
            with Recorder() as recorder:
                assert check_gradients(model)
            assert [event.name for event in recorder.events] == ["allreduce_"]
            spoil(model, name, math.inf, rank)
            with pytest.raises(NonFiniteError, match=f"'{name}' has inf on rank {rank}\\."):
                check_gradients(model)
            assert check_gradients(model, "skip") is False


@pytest.mark.parametrize("covering", [True, False])
def test_units_on_different_meshes_have_one_verdict(covering: bool) -> None:
    run_ranks(check_meshes, 4, covering)


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelized(mesh["tensor"])
    shard_units(model, model.pairs, mesh=mesh["data"])
    for name in ("pairs.0.norm.weight", "pairs.1.up.weight", "pairs.1.down.weight"):
        for rank in (holders(model, name)[0], holders(model, name)[-1]):
            model(batch(0, dist.get_rank() // 2)).sum().backward()
            assert check_gradients(model)
            spoil(model, name, math.nan, rank)
            with pytest.raises(NonFiniteError, match=f"'{name}' has NaN on rank {rank}\\."):
                check_gradients(model)
            assert check_gradients(model, "skip") is False


def test_tensor_parallel_ranks_have_one_verdict() -> None:
    run_ranks(check_tensor_parallel, 4)


def check_some_ranks_of_the_world() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))["data"]
    model = shard_units(make(MLP), [], mesh=mesh)
    model(inputs_of(0, rank)).sum().backward()
    if rank >= 2:  # the other pair is asked nothing
        spoil(model, "layers.0.weight", math.nan, 2)
        assert check_gradients(model, "skip") is False
    dist.barrier()
    assert rank >= 2 or check_gradients(model)


def test_ranks_that_do_not_share_the_parameters_are_not_asked() -> None:
    run_ranks(check_some_ranks_of_the_world, 4)


# Gradients of all kinds


def check_none_at_all() -> None:
    model = sharded_gpt()
    assert check_gradients(model)
    assert check_gradients(nn.Identity())
    backward(model).zero_grad()
    assert check_gradients(model)


def test_a_model_without_gradients_passes() -> None:
    run_ranks(check_none_at_all, 2)
    assert check_gradients(nn.Identity())


def check_empty_parts() -> None:
    model = shard_units(make(OddParameters), [])
    for name in ("scale", "single", "wide", "transposed"):
        model.zero_grad()
        model(inputs_of(0, 0, 3)).sum().backward()
        assert check_gradients(model)
        rank = holder(model, name)
        spoil(model, name, math.nan, rank)
        with pytest.raises(NonFiniteError, match=f"'{name}' has NaN on rank {rank}\\."):
            check_gradients(model)


def test_ranks_that_hold_nothing_of_a_parameter_hear_of_it() -> None:
    run_ranks(check_empty_parts, 4)


def check_plain() -> None:
    model = make(MLP)
    model(inputs_of(0, 0)).sum().backward()
    assert check_gradients(model)
    spoil(model, "layers.2.bias", math.nan, 1)
    with pytest.raises(NonFiniteError, match=r"'layers\.2\.bias' has NaN on rank 1\."):
        check_gradients(model)
    assert check_gradients(model, "skip") is False
    assert all(p.grad is None for p in model.parameters())


def test_plain_gradients_have_one_verdict_too() -> None:
    run_ranks(check_plain, 2)


def check_mixed() -> None:
    """A sharded model with a parameter of another kind in it."""
    model = make(MLP)
    whole = init_device_mesh("cpu", (2,))
    model.plain = nn.Parameter(torch.ones(3))
    model.cut = nn.Parameter(distribute_tensor(torch.ones(3, 2), whole, [Shard(0)]))
    fully_shard(model, mesh=whole, ignored_params={model.plain, model.cut})
    model(inputs_of(0, 0)).sum().backward()
    model.plain.sum().backward()
    model.cut.sum().backward()
    assert check_gradients(model)
    for name in ("plain", "cut", "layers.1.bias"):
        rank = holder(model, name)
        spoil(model, name, math.nan, rank)
        with pytest.raises(NonFiniteError, match=f"'{name}' has NaN on rank {rank}"):
            check_gradients(model)


def test_plain_gradients_and_dtensors_in_a_sharded_model_are_checked() -> None:
    run_ranks(check_mixed, 2)


def check_gathered() -> None:
    model = make(MLP)
    wrapper = nn.Sequential(shard_units(model, [], reshard_after_forward=False))
    wrapper(inputs_of(0, 0)).sum().backward()
    model.unshard()
    assert model.layers[0].weight.shape == (5, 5)
    assert not hasattr(model.layers[0].weight, "placements"), "it is not gathered"
    assert check_gradients(wrapper)
    model.reshard()
    spoil(model, "layers.0.weight", math.nan, 0)
    model.unshard()
    with pytest.raises(NonFiniteError, match=r"'0\.layers\.0\.weight' has NaN on rank 0"):
        check_gradients(wrapper)
    assert check_gradients(wrapper, "skip") is False
    assert check_gradients(wrapper)


def test_gradients_are_found_while_the_parameters_are_gathered() -> None:
    run_ranks(check_gathered, 2)


class Parameters(nn.Module):
    """Parameters with these gradients, for this process alone."""

    def __init__(self, **gradients: Tensor) -> None:
        super().__init__()
        for name, gradient in gradients.items():
            parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
            parameter.grad = gradient
            self.register_parameter(name, parameter)


def sparse(value: float) -> Tensor:
    """As an embedding's gradient: two terms for one place."""
    values = torch.tensor([2.0, value])
    return torch.sparse_coo_tensor([[0, 0]], values, (7,), check_invariants=True)


LARGE = {
    "bf16": torch.full((1000,), 3e38, dtype=torch.bfloat16),
    "fp16": torch.full((1000,), 6e4, dtype=torch.float16),
    "fp32": torch.full((1000,), 3e38),
    "fp64": torch.full((1000,), 1e308, dtype=torch.float64),
    "complex": torch.full((10,), 3e38 + 3e38j, dtype=torch.complex64),
    "fp8": torch.full((9,), 448.0).to(torch.float8_e4m3fn),
    "sparse": sparse(3.0),
}


def test_large_gradients_are_finite_even_where_their_sum_is_not() -> None:
    assert check_gradients(Parameters(**LARGE))


@pytest.mark.parametrize("name", list(LARGE))
def test_nan_is_found_in_gradients_of_every_dtype(name: str) -> None:
    gradients = {key: value.clone() for key, value in LARGE.items()}
    if name == "sparse":
        gradients[name] = sparse(math.nan)
    else:
        gradients[name][5] = math.nan
    with pytest.raises(NonFiniteError, match=f"of 1 parameter are not finite: '{name}' has NaN on"):
        check_gradients(Parameters(**gradients))


def test_what_lies_between_two_gradients_does_not_count() -> None:
    buffer = torch.zeros(10)
    buffer[5] = math.nan
    assert check_gradients(Parameters(first=buffer[:5], second=buffer[6:]))
    buffer[9] = math.nan
    with pytest.raises(NonFiniteError, match="of 1 parameter are not finite: 'second' has NaN on"):
        check_gradients(Parameters(first=buffer[:5], second=buffer[6:]))


def test_gradients_that_lie_far_apart_are_all_checked() -> None:
    buffer = torch.zeros(100)
    assert check_gradients(Parameters(first=buffer[:5], second=buffer[95:]))
    buffer[99] = math.nan
    with pytest.raises(NonFiniteError, match="of 1 parameter are not finite: 'second' has NaN on"):
        check_gradients(Parameters(first=buffer[:5], second=buffer[95:]))


def test_gradients_that_are_not_contiguous_are_checked() -> None:
    buffer = torch.zeros(4, 6)
    assert check_gradients(Parameters(turned=buffer.t(), columns=buffer[:, 1:3]))
    buffer[3, 2] = math.inf
    with pytest.raises(NonFiniteError, match="of 2 parameters are not finite: 'turned' has inf on"):
        check_gradients(Parameters(turned=buffer.t(), columns=buffer[:, 1:3]))


# The message


def test_the_message_lists_ranks_as_ranges() -> None:
    found = [[("w", "NaN", [rank])] if rank in (4, 5, 6, 9) else [] for rank in range(4, 10)]
    assert finite._sentence(finite._merged(found)) == (
        "gradients of 1 parameter are not finite: 'w' has NaN on ranks 4-6, 9"
    )


def test_the_message_names_eight_parameters_and_counts_the_rest() -> None:
    bad = [(f"p{index}", "NaN and inf" if index == 0 else "inf", [0]) for index in range(20)]
    text = finite._sentence(bad)
    assert text.startswith("gradients of 20 parameters are not finite: 'p0' has NaN and inf on ")
    assert text.endswith("'p7' has inf on rank 0, and 12 more")
