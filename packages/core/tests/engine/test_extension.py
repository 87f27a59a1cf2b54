"""Tensor subclasses that gather themselves (``fsdp_pre_all_gather``)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import (
    MixedPrecisionPolicy,
    RaggedTensor,
    check_gradients,
    clip_grad_norm_,
    fully_shard,
    unsharded,
)
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.dbuffer import hand_back
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, averaged_gradients, full_gradients, shard_units
from .models import MLP, Branches, inputs_of, make
from .recorders import Recorder
from .subclasses import Coded, Narrow, Pair, Wrapped, encoded, loss_of, made, wrap_weights

Shards = Callable[..., Any]
Run = tuple[list[float], dict[str, tuple[Tensor, ...]]]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: nn.Module, by: Shards = fully_shard, **options: Any) -> nn.Module:
    for layer in model.layers:
        by(layer, **options)
    by(model, **options)
    return model


def parts(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """What this rank holds of each wrapped parameter, and the whole of each plain one."""
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local().detach()
        tensors = local.held if isinstance(local, Wrapped) else (parameter.full_tensor().detach(),)
        found[name] = tuple(tensor.clone() for tensor in tensors)
    return found


def train(model: nn.Module, num_steps: int = 3, micro_batches: int = 1, **options: Any) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    losses = []
    for step in range(num_steps):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = loss_of(model, step + 100 * micro)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.held[0] if isinstance(loss, Wrapped) else loss).item())
    return losses, parts(model)


def assert_same(ours: Run, theirs: Run) -> None:
    assert ours[0] == theirs[0]
    for name, tensors in theirs[1].items():
        for mine, other in zip(ours[1][name], tensors, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=name)


# The same as FSDP2


def check_against_fsdp2() -> None:
    cases = [
        (Narrow, 6, {}),
        (Narrow, 5, {"reshard_after_forward": False}),  # rows: 3 and 2
        (Narrow, 5, {"mp_policy": BF16}),
        (Narrow, 1, {"reshard_after_forward": True}),  # rows: 1 and 0
        (Coded, 6, {"mp_policy": BF16, "reshard_after_forward": True}),
        (Wrapped, 5, {"mp_policy": BF16}),  # without the methods: forward sees plain tensors
    ]
    for subclass, width, options in cases:
        ours = train(shard(made(subclass, width), **options))
        theirs = train(shard(made(subclass, width), torch_fully_shard, **options))
        assert_same(ours, theirs)


def test_training_equals_fsdp2_bit_for_bit() -> None:
    run_ranks(check_against_fsdp2, 2)


def check_pairs() -> None:
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        runs = []
        for by in (fully_shard, torch_fully_shard):
            model = wrap_weights(make(MLP, 3, 6, False), Pair, 2)
            runs.append(train(shard(model, by, **options), micro_batches=2, foreach=True))
        assert_same(*runs)
        assert torch.equal(*runs[0][1]["layers.0.weight"])


def test_a_gathered_parameter_may_be_a_subclass_itself() -> None:
    run_ranks(check_pairs, 2)


class Reference(nn.Module):
    """What `Coded` computes, in one process: forward sees the rounded weights of a plain model."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.plain.layers:
            codes, scale = encoded(layer.weight.detach(), Coded.levels)
            rounded = codes * scale
            weight = layer.weight + (rounded - layer.weight).detach()  # straight through
            x = torch.tanh(nn.functional.linear(x, weight, layer.bias))
        return x


def check_uneven_codes() -> None:
    model, plain = shard(made(Coded, 5)), make(MLP, 3, 5)
    reference = Reference(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    ranks = range(dist.get_world_size())
    for step in range(3):
        loss_of(model, step).backward()
        sum(reference(inputs_of(step, rank)).square().mean() for rank in ranks).backward()
        for parameter in plain.parameters():
            parameter.grad /= len(ranks)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = parts(model)
    for name, parameter in plain.named_parameters():
        whole = parameter.detach()
        if name.endswith("weight"):
            chunks = whole.chunk(len(ranks))
            whole = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else whole[:0]
        torch.testing.assert_close(found[name][0], whole, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 4])  # rows of 5: all; 3 and 2; 2, 2, 1 and none
def test_several_inputs_of_uneven_rows_train_like_one_process(world_size: int) -> None:
    # FSDP2 refuses inputs of several shapes if rows are uneven, and loses all but one on one rank.
    run_ranks(check_uneven_codes, world_size)


# Meshes


def check_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    seen: list[DeviceMesh] = []

    class Asking(Narrow):
        def fsdp_pre_all_gather(self, mesh: DeviceMesh, *given: Any) -> Any:
            seen.append(mesh)
            return super().fsdp_pre_all_gather(mesh, *given)

        # Five arguments, as the protocol counts them.
        fsdp_pre_all_gather.__signature__ = inspect.signature(Narrow.fsdp_pre_all_gather)

    ours = train(shard(made(Asking, 5), mesh=mesh))
    assert {(each.ndim, each.mesh_dim_names) for each in seen} == {(1, ("shard",))}
    theirs = train(shard(made(Narrow, 5), torch_fully_shard, mesh=mesh))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_replicas_train_as_with_fsdp2_and_the_subclass_sees_the_axis_that_shards() -> None:
    run_ranks(check_replicas, 4)


class Parallel(nn.Module):
    """Two layers, cut by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    runs, placed = [], []
    for by in (fully_shard, torch_fully_shard):
        model = wrap_weights(make(Parallel), Narrow)
        parallelize_module(model, mesh["tensor"], plan)
        by(model, mesh=mesh["data"], reshard_after_forward=True)
        placed.append([layer.weight.placements for layer in model.layers])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            losses.append(model(inputs_of(step, dist.get_rank() // 2, 6)).square().mean())
            losses[-1].backward()
            if by is fully_shard:
                whole = [parameter.grad.full_tensor() for parameter in model.parameters()]
                expected = torch.stack([gradient.norm() for gradient in whole]).norm()
                torch.testing.assert_close(clip_grad_norm_(model, 1e9), expected)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((losses, [layer.weight.to_local().held[0] for layer in model.layers]))
    assert placed[0] == placed[1]
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-6, atol=1e-6)


def test_tensor_parallelism_comes_first_as_with_fsdp2() -> None:
    run_ranks(check_tensor_parallel, 4)


# One unit


def check_one_unit() -> None:
    model = fully_shard(made(Coded, 5))
    kinds = {name: type(p.to_local()) for name, p in model.named_parameters()}
    assert kinds["layers.0.weight"] is Coded
    assert kinds["layers.0.bias"] is Tensor
    assert type(model.layers[0].weight.data) is DTensor
    assert model.layers[0].weight.placements == (Shard(0),)
    assert type(model.layers[0].bias.data) is RaggedTensor
    for _ in range(3):
        with Recorder() as forward:
            loss = loss_of(model, 0)
        with Recorder() as backward:
            loss.backward()
        # Three weights by themselves, two inputs each, and the biases together.
        assert (forward.count("gathers"), forward.count("reductions")) == (4, 0)
        assert (backward.count("gathers"), backward.count("reductions")) == (0, 4)
        assert all(event.is_async for event in forward.events + backward.events)
    gradient = model.layers[0].weight.grad
    assert type(gradient.to_local()) is Tensor
    assert gradient.placements == (Shard(0),)


@pytest.mark.usefixtures("each_alone")
def test_a_unit_gathers_wrapped_parameters_one_by_one_and_the_others_together() -> None:
    run_ranks(check_one_unit, 2)


UNUSED = ["branches.c.weight", "branches.c.bias"]


def check_some_ranks() -> None:
    model, plain = wrap_weights(make(Branches), Narrow), make(Branches)
    shard_units(model, model.branches.values())
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 2:  # the weights: forward sees what has travelled
                parameter.copy_(parameter.bfloat16())
    used = [("a", "b"), ("b",)][dist.get_rank()]
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(inputs_of(step, dist.get_rank(), 4), *used).square().mean().backward()
        expected = averaged_gradients(plain)
        assert [name for name in expected if expected[name] is None] == UNUSED
        assert_bit_equal(full_gradients(model), expected)


def test_units_that_some_ranks_leave_out() -> None:
    run_ranks(check_some_ranks, 2)


def check_prefetch() -> None:
    log: list[str] = []

    class Logging(Narrow):
        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> Any:
            log.append(f"send {module.name}")
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

        def fsdp_post_all_gather(self, *given: Any, **options: Any) -> Any:
            log.append("receive")
            return super().fsdp_post_all_gather(*given, **options)

    model = shard(made(Logging), in_flight=2)
    for index, layer in enumerate(model.layers):
        layer.name = index
        layer.register_forward_hook(lambda layer, *_: log.append(f"ran {layer.name}"))
    for _ in range(2):
        log.clear()
        loss_of(model, 0).backward()
    forward = log[: log.index("ran 2") + 1]
    assert forward == [
        *("send 0", "send 1", "receive", "ran 0"),
        *("send 2", "receive", "ran 1"),
        *("receive", "ran 2"),
    ]


def test_the_next_gather_is_under_way_while_a_unit_computes() -> None:
    run_ranks(check_prefetch, 2)


def check_memory() -> None:
    arrived: list[Tensor] = []

    class Watching(Narrow):
        def fsdp_post_all_gather(self, outputs: Any, *given: Any, **options: Any) -> Any:
            arrived.append(outputs[0])
            return super().fsdp_post_all_gather(outputs, *given, **options)

    model = made(Watching, 128)  # large enough to be freed on a CPU
    shard(model, reshard_after_forward=True)
    seen: list[nn.Parameter] = []
    model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    for _ in range(2):
        loss = loss_of(model, 0)
        whole = seen[-1]
        for step in (lambda: None, loss.backward):
            step()
            assert whole.untyped_storage().nbytes() == 0
            hand_back()
            assert not any(rows.any() for rows in arrived), "pages that are gone read as zeros"
    # Each forward has a view of its own, of the same memory.
    assert len({each.untyped_storage()._cdata for each in seen}) == 1
    model.layers[0].unshard()
    assert whole.untyped_storage().nbytes() == 4 * 128 * 128
    assert arrived[-1].any()
    assert len({rows.data_ptr() for rows in arrived}) == 3, "one place per parameter"


def test_memory_goes_after_forward_and_backward_and_comes_back_to_the_same_place() -> None:
    run_ranks(check_memory, 2)


# What users do between steps


def check_states(folder: str) -> None:
    model = shard(made(Narrow, 5))
    train(model, 2)
    expected, batch = parts(model), inputs_of(9, 0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(([], parts(twin)), ([], expected))
    model.load_state_dict(state)
    assigned = shard(made(Narrow, 5))
    assigned.load_state_dict(state, assign=True)
    on_meta = shard(wrap_weights(MLP(3, 5).to("meta"), Narrow))
    on_meta.to_empty(device="cpu")
    on_meta.load_state_dict(state)
    torch.serialization.add_safe_globals([Narrow])  # as the users of DCP have to
    save(Path(folder) / "step", model)
    loaded = shard(made(Narrow, 5))
    load(Path(folder) / "step", loaded)
    for each in (model, assigned, on_meta, loaded, twin):
        assert_same(([], parts(each)), ([], expected))
        assert torch.equal(each(batch), twin(batch))


def test_state_dicts_copies_and_checkpoints_keep_the_subclass(tmp_path: Path) -> None:
    run_ranks(check_states, 2, str(tmp_path))


def check_conversion() -> None:
    model = shard(made(Narrow, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    model.double()
    before = parts(model)["layers.0.weight"][0]
    model(inputs_of(0, 0).double()).sum().backward()
    weight = model.layers[0].weight
    assert (type(weight.to_local()), weight.dtype) == (Narrow, torch.float64)
    assert weight.grad.dtype is torch.float64
    optimizer.step()  # it has the same parameters
    after = weight.to_local().held[0]
    torch.testing.assert_close(after, before - 0.5 * weight.grad.to_local())


def test_conversion_keeps_the_subclass_and_the_identity_of_the_parameter() -> None:
    run_ranks(check_conversion, 2)


def check_unsharded() -> None:
    model, pairs = shard(made(Narrow, 5)), shard(wrap_weights(make(MLP, 3, 6, False), Pair, 2))
    with unsharded(model, pairs):
        assert model.layers[0].weight.shape == (5, 5)
        state, state_of_pairs = model.state_dict(), pairs.state_dict()
    expected = make(MLP, 3, 5).layers[0].weight
    assert torch.equal(state["layers.0.weight"], expected.bfloat16().float())
    expected = make(MLP, 3, 6, False).layers[0].weight
    assert torch.equal(state_of_pairs["layers.0.weight"].held[1], expected)
    gathered = unsharded(model.layers[0], writeback=True)
    with pytest.raises(NotImplementedError, match="'weight', which gathers itself"), gathered:
        pass


def test_a_state_dict_of_gathered_parameters_outlives_them() -> None:
    run_ranks(check_unsharded, 2)


def check_clipping() -> None:
    model, theirs = shard(made(Narrow, 5)), shard(made(Narrow, 5), torch_fully_shard)
    for each in (model, theirs):
        loss_of(each, 0).backward()
    assert check_gradients(model)
    norm = clip_grad_norm_(model, 0.01)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01).full_tensor()
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(model.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.weight.grad.to_local(), other.weight.grad.to_local())
    model.layers[1].weight.grad.to_local().fill_(torch.nan)
    assert not check_gradients(model, "skip")


def test_clipping_and_checks_of_gradients_see_them() -> None:
    run_ranks(check_clipping, 2)


def check_patched() -> None:
    class Late(Wrapped):
        """Gets its methods when it is sharded already."""

    model = wrap_weights(make(MLP, 3, 6).to("meta"), Late)
    shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    for layer in model.layers:
        local = layer.weight._local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            setattr(local, name, MethodType(getattr(Narrow, name), local))
            local.pads = True
    plain = make(MLP, 3, 6)
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 0.25)
    assert torch.equal(loss_of(model, 0), loss_of(plain, 0))


def test_methods_may_be_given_to_local_parts_until_the_first_forward() -> None:
    run_ranks(check_patched, 2)


def check_undispatched() -> None:
    class Tagged(torch.Tensor):
        """Has the methods, but no dispatch: operators of DTensor see a plain tensor."""

        fsdp_pre_all_gather = fsdp_post_all_gather = print

    model = make(MLP)
    weight = model.layers[0].weight
    model.layers[0].weight = nn.Parameter(weight.detach().as_subclass(Tagged))
    fully_shard(model)
    assert type(model.layers[0].weight.data) is RaggedTensor
    assert torch.equal(loss_of(model, 0), loss_of(make(MLP), 0))


def test_a_subclass_that_no_dtensor_can_hold_is_an_ordinary_parameter() -> None:
    run_ranks(check_undispatched, 2)
