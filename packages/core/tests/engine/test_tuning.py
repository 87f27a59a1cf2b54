"""FSDP2's methods that tune communication: they change when and how, not what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from vescale_fsdp import FSDPModule, fully_shard, share_comm_ctx
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, shard_units
from .models import MLP, inputs_of, make
from .recorders import Recorder

WORLD_SIZE = 2


def sharded(**options: Any) -> MLP:
    model = make(MLP)
    shard_units(model, model.layers, **options)
    return model


def assert_gradients_of_ddp(model: nn.Module, step: int, factor: float = 1.0) -> None:
    rank = dist.get_rank()
    plain = make(MLP)
    plain(inputs_of(step, rank)).sum().backward()
    model.zero_grad()
    model(inputs_of(step, rank)).sum().backward()
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        wanted = expected[name] * factor
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-7, msg=name)


def check_every_method() -> None:
    model = fully_shard(make(MLP))
    for name in vars(TorchFSDPModule):
        if callable(getattr(TorchFSDPModule, name)) and not name.startswith("__"):
            ours = getattr(FSDPModule, name)
            assert ours.__module__.startswith("vescale_fsdp."), f"{name} is torch's own"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has no effect here")  # test_without_effect
        model.set_is_last_backward(False)
        model.set_separate_reduce_scatter_group(False)
        model._set_unshard_async_op(True)
        model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_divide_factor(4.0)
    assert_gradients_of_ddp(model, 0, factor=0.5)
    share_comm_ctx([model])
    with pytest.raises(ValueError, match="Expects list of FSDPModules but got Linear"):
        share_comm_ctx([nn.Linear(1, 1)])


def test_all_methods_of_fsdp2_are_there() -> None:
    run_ranks(check_every_method, WORLD_SIZE)


def gathers_under_way(model: MLP) -> list[list[int]]:
    """For each layer, which layers are gathered or on their way while it runs in forward."""
    seen: list[list[int]] = []

    def look(*_: Any) -> None:
        units = [unit_of(layer) for layer in model.layers]
        seen.append([i for i, unit in enumerate(units) if unit and not unit.is_sharded])

    handles = [layer.register_forward_hook(look, prepend=True) for layer in model.layers]
    model(inputs_of(0, 0))
    for handle in handles:
        handle.remove()
    return seen


def check_forward_prefetch() -> None:
    model = sharded()
    gathers_under_way(model)  # the first pass predicts nothing
    assert gathers_under_way(model) == [[0, 1], [1, 2], [2]]
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
    model.layers[1].set_modules_to_forward_prefetch([])
    assert gathers_under_way(model) == [[0, 1, 2], [1, 2], [2]]
    assert_gradients_of_ddp(model, 0)
    with pytest.raises(ValueError, match="Expects FSDPModule but got <class"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


def test_forward_prefetch_follows_the_list() -> None:
    run_ranks(check_forward_prefetch, WORLD_SIZE)


def check_backward_prefetch() -> None:
    model = sharded()
    for step in range(2):
        assert_gradients_of_ddp(model, step)
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    seen: list[list[int]] = []

    def look(_: Tensor) -> None:
        units = [unit_of(layer) for layer in model.layers]
        seen.append([i for i, unit in enumerate(units) if unit and not unit.is_sharded])

    def hook_the_weight(layer: nn.Module, _: Any) -> None:  # each forward has one of its own
        layer.weight.register_hook(look)

    model.layers[2].register_forward_pre_hook(hook_the_weight)
    model(inputs_of(0, dist.get_rank())).sum().backward()
    assert seen == [[0, 1, 2]]


def test_backward_prefetch_follows_the_list() -> None:
    run_ranks(check_backward_prefetch, WORLD_SIZE)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.out(self.table(index))


def check_without_gather_in_backward() -> None:
    plain, model = make(Lookup), make(Lookup)
    shard_units(model, [model.table, model.out])
    model.table.set_unshard_in_backward(False)
    index = torch.tensor([1, 3, 3])
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        plain(index).sum().backward()
        out = model(index)
        with Recorder() as recorder:
            out.sum().backward()
        assert recorder.count("gathers") == 1  # of the linear layer
        for name, gradient in full_gradients(model).items():
            assert torch.equal(gradient, plain.get_parameter(name).grad), name


def test_an_embedding_needs_no_gather_in_backward() -> None:
    run_ranks(check_without_gather_in_backward, WORLD_SIZE)


def check_hook() -> None:
    model = make(MLP, 1)
    fully_shard(model)
    shapes: list[tuple[int, ...]] = []

    def double(shard: Tensor) -> None:
        shapes.append(tuple(shard.shape))
        shard.mul_(2.0)

    model.set_all_reduce_hook(double)
    plain = make(MLP, 1)
    plain(inputs_of(0, dist.get_rank())).sum().backward()
    model(inputs_of(0, dist.get_rank())).sum().backward()
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, 2 * expected[name]), name
    assert shapes == [(unit_of(model).groups[0].layout.shard_size,)]


def test_the_hook_sees_each_reduced_shard() -> None:
    run_ranks(check_hook, WORLD_SIZE)


class Gather:
    """A custom gather in FSDP2's form; counts its calls."""

    calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Gather):
    """Sums in halves, and so works on its result before it returns."""

    def __call__(  # type: ignore[override]
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.calls += 1
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(output_tensor, input_tensor / 2, op=op, group=group, async_op=async_op)
        output_tensor.mul_(2)


def check_custom_collectives() -> None:
    model = sharded()
    gather, reduce = Gather(), ReduceScatter()
    model.layers[1].set_custom_all_gather(gather)
    model.layers[1].set_custom_reduce_scatter(reduce)
    for step in range(3):
        assert_gradients_of_ddp(model, step)
    assert (gather.calls, reduce.calls) == (6, 3)
    with pytest.raises(AssertionError, match="when all gather comm is custom: Gather"):
        model.layers[1].set_allocate_memory_from_process_group_for_comm(True)


def test_custom_collectives_are_used() -> None:
    run_ranks(check_custom_collectives, WORLD_SIZE)


def check_limits() -> None:
    model = sharded()
    with pytest.raises(TypeError, match="max_input_buffers must be an int, got bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="max_input_buffers must be a positive int, got 0"):
        model.set_reduce_scatter_max_input_buffers(0)
    model.set_reduce_scatter_max_input_buffers(3)
    assert_gradients_of_ddp(model, 0)
    assert unit_of(model).engine.passes.window.policy.reductions == 3


def test_the_number_of_reductions_under_way_can_be_set() -> None:
    run_ranks(check_limits, WORLD_SIZE)


def check_zeros() -> None:
    model = make(MLP)
    model.unused = nn.Linear(2, 2)
    fully_shard(model)
    for gives_zeros in (False, True, False):
        model.set_reduce_scatter_unused_params(gives_zeros)
        model.zero_grad()
        model(inputs_of(0, 0)).sum().backward()
        gradient = model.unused.weight.grad
        assert (gradient is None) == (not gives_zeros)
        if gradient is not None:
            assert torch.equal(gradient.full_tensor(), torch.zeros(2, 2))


def test_unused_parameters_get_zeros_on_request() -> None:
    run_ranks(check_zeros, WORLD_SIZE)


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_pipeline(num_steps: int) -> None:
    """Two stages of two ranks each; every data rank feeds its own micro-batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number, data_rank = (mesh.get_local_rank(name) for name in ("stage", "data"))
    chunks = [make(Chunk, seed=seed) for seed in (1, 2)]
    model = make(Chunk, seed=number + 1)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss)
    for step in range(num_steps):
        model.zero_grad()
        batches = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(2)
        ]
        if number == 0:
            schedule.step(batches[data_rank])
        else:
            schedule.step(target=batches[data_rank])
        for chunk in chunks:
            chunk.zero_grad()
        for batch in batches:
            loss(chunks[1](chunks[0](batch)), batch).div(2).backward()
        expected = dict(chunks[number].named_parameters())
        for name, gradient in full_gradients(model).items():
            wanted = expected[name].grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7, msg=name)


def test_a_pipeline_of_torch_trains_sharded_stages() -> None:
    run_ranks(check_pipeline, 4, 2)


def check_pipeline_end() -> None:
    rank = dist.get_rank()
    plain, model = make(MLP), sharded()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for step in range(3):
        plain(inputs_of(step, rank)).sum().backward()
        model(inputs_of(step, rank)).sum().backward()
        assert model.layers[0].weight.grad is None
    # What torch.distributed.pipelining does when all micro-batches are through.
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fully_shard.state(model)
    contexts = {id(each._comm_ctx) for each in state._state_ctx.all_states}
    assert contexts == {id(state._comm_ctx)} != {id(fully_shard.state(sharded())._comm_ctx)}
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    assert all(unit_of(layer).is_sharded for layer in model.layers)
    assert fully_shard.state(nn.Linear(1, 1)) is None


def test_a_pipeline_reduces_all_micro_batches_at_its_end() -> None:
    run_ranks(check_pipeline_end, WORLD_SIZE)


def check_hook_on_a_stream() -> None:
    model = fully_shard(make(MLP))
    stream = torch.cpu.Stream()
    with pytest.warns(UserWarning, match="not queued on streams"):
        model.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=stream)
    expected = fully_shard(make(MLP))
    for each in (model, expected):
        each(inputs_of(0, dist.get_rank())).sum().backward()
    for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), 2 * plain.grad.to_local())


def test_a_hook_may_name_a_stream_on_a_cpu_too() -> None:
    run_ranks(check_hook_on_a_stream, 2)
