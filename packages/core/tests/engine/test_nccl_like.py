"""On groups that take tensors of an accelerator only, as NCCL's do: also offloaded parameters.

There is no accelerator here: see `accelerator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.optim import SGD, AdamW

from vescale_fsdp import (
    QuantizedGather,
    QuantizedReduce,
    check_gradients,
    clip_grad_norm_,
    fully_shard,
)
from vescale_fsdp.backends import Detour, backend_name
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from vescale_fsdp.engine.axes import comm_for
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.optim import SOAP, Muon, OptimizerGroup, Shampoo
from vescale_fsdp.ragged import distribute_tensor
from vescale_fsdp.testing import run_ranks

from .accelerator import DEVICE, NCCLLike, nccl_like_world
from .helpers import Tensors, assert_bit_equal, full, full_parameters, shard_units
from .models import MLP, Branches, inputs_of, make

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NAMES = ("replicate", "shard")
WIDTH = 12
Trained = tuple[Tensors, list[Tensor]]


def mesh_on(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device.type, shape, mesh_dim_names=NAMES[-len(shape) :])


def offloaded() -> dict[str, Any]:
    """Options of a unit that rests on the CPU, where there is an accelerator."""
    return {"offload_policy": CPUOffloadPolicy()} if torch.accelerator.is_available() else {}


def comms_of(model: nn.Module) -> list[Any]:
    return [comm_for(group.axes) for unit in units_in(model).values() for group in unit.groups]


def on_both(train: Callable[[torch.device], Any], backend: str | None = "stand_in") -> list[Any]:
    """What ``train`` returns on gloo and CPUs, and on what is like NCCL and an accelerator."""
    expected = train(torch.device("cpu"))
    with nccl_like_world(backend):
        return [train(DEVICE), expected]


# --- training -------------------------------------------------------------------------------------


def muon(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return OptimizerGroup([Muon(matrices, lr=0.01), AdamW(others)])


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "muon": muon,
    "shampoo": lambda model: Shampoo(model.parameters(), precondition_frequency=2, mode="owner"),
    "soap": lambda model: SOAP(model.parameters(), lr=0.01),
}


def trained(
    device: torch.device,
    optimizer_name: str,
    shape: tuple[int, ...],
    options: dict[str, Any],
    *,
    offloads: bool = True,
    order: float = 2.0,
) -> Trained:
    """The parameters and the norms of gradients of four steps."""
    model = make(MLP, 3, WIDTH)
    options = {"mesh": mesh_on(device, shape), **options, **(offloaded() if offloads else {})}
    shard_units(model, model.layers, **options)
    optimizer = OPTIMIZERS[optimizer_name](model)
    norms = []
    for step in range(4):
        # Nothing of a forward or a backward has to take another way.
        with mock.patch.object(Detour, "__init__", side_effect=AssertionError("a detour")):
            batch = inputs_of(step, dist.get_rank(), WIDTH).to(device)
            model(batch).float().square().sum().backward()
        norms.append(clip_grad_norm_(model, 0.5, norm_type=order).cpu())
        assert check_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == DEVICE.type:
        groups = [group for comm in comms_of(model) for group in comm.reducing_groups]
        groups += [comm.gather_group for comm in comms_of(model)]
        assert all(isinstance(group, NCCLLike) and group.calls for group in groups)
        assert not [text for group in groups for text in group.misaligned]
    return {name: value.cpu() for name, value in full_parameters(model).items()}, norms


def check_training(
    optimizer_name: str, shape: tuple[int, ...], options: dict[str, Any], more: dict[str, Any]
) -> None:
    (found, norms), (expected, expected_norms) = on_both(
        lambda device: trained(device, optimizer_name, shape, options, **more)
    )
    # The last bit of a norm, and so of what is clipped by it, depends on where tensors lie.
    torch.testing.assert_close(norms, expected_norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_offloaded_parameters_train_as_on_gloo_with(name: str) -> None:
    run_ranks(check_training, 2, name, (2,), {}, {})


@pytest.mark.parametrize(
    ("shape", "options", "more"),
    [
        ((2,), {}, {"offloads": False}),
        ((2,), {}, {"order": float("inf")}),
        ((2,), {"mp_policy": BF16}, {}),
        ((2, 2), {}, {}),
        ((2, 2), {"sharding": "hsdp_zero1"}, {}),
        ((4,), {"reshard_after_forward": 2}, {}),
    ],
)
@pytest.mark.sampled(3)
def test_so_they_do_where(
    shape: tuple[int, ...], options: dict[str, Any], more: dict[str, Any]
) -> None:
    run_ranks(check_training, torch.Size(shape).numel(), "adamw", shape, options, more)


def check_quantized(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    options = {
        "gather_codec": QuantizedGather("int8"),
        "reduce_codec": QuantizedReduce(),
        **options,
    }
    check_training("adamw", shape, options, {})


@pytest.mark.parametrize(("shape", "options"), [((2,), {}), ((2, 2), {"sharding": "hsdp_zero1"})])
def test_so_they_do_where_codes_travel(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    run_ranks(check_quantized, torch.Size(shape).numel(), shape, options)


def without_some(device: torch.device) -> list[list[str]]:
    """Rank 1 alone uses "b" and nobody "c": the names without a gradient, by the backward."""
    model = make(Branches)
    shard_units(model, model.branches.values(), mesh=mesh_on(device, (2,)), **offloaded())
    left_out = []
    for step in range(3):
        names = ["a", "b"] if dist.get_rank() == 1 else ["a"]
        model(inputs_of(step, dist.get_rank(), 4).to(device), *names).sum().backward()
        left_out.append([name for name, p in model.named_parameters() if p.grad is None])
        model.zero_grad()
    return left_out


def check_unused() -> None:
    found, expected = on_both(without_some)
    assert found == expected == [["branches.c.weight", "branches.c.bias"]] * 3


def test_offloaded_parameters_that_no_rank_uses_have_no_gradient() -> None:
    run_ranks(check_unused, 2)


def check_units_that_rest_in_two_places() -> None:
    def norms_of(device: torch.device) -> list[Tensor]:
        model, mesh = make(Branches), mesh_on(device, (2,))
        fully_shard(model.branches["a"], mesh=mesh, **offloaded())
        fully_shard(model, mesh=mesh)
        norms = []
        for order in (2.0, 1.0, float("inf")):
            model(inputs_of(0, dist.get_rank(), 4).to(device), "a").sum().backward()
            norms.append(clip_grad_norm_(model, 0.1, norm_type=order).cpu())
            norms.append(clip_grad_norm_(model, 0.1, norm_type=order).cpu())
            assert check_gradients(model)
            model.zero_grad()
        return norms

    found, expected = on_both(norms_of)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_clipping_goes_over_units_that_rest_on_the_cpu_and_others_that_do_not() -> None:
    run_ranks(check_units_that_rest_in_two_places, 2)


# --- what a backend is called ---------------------------------------------------------------------


def check_average(backend: str | None, spelling: str) -> None:
    with nccl_like_world(backend):
        assert dist.get_backend() == spelling
        model = make(Branches)
        shard_units(model, [], mesh=mesh_on(DEVICE, (2,)))
        model(inputs_of(0, dist.get_rank(), 4).to(DEVICE), "a").sum().backward()
        (comm,) = comms_of(model)
        assert comm.reduction == "native"
        gathers, reductions = (
            [call for call, *_ in group.calls] for group in (comm.gather_group, comm.reduce_group)
        )
        # The first ones connect, by what the step sends.
        assert gathers == ["all-gather"] * 2
        assert reductions == ["reduce-scatter AVG", "all-reduce MAX"] * 2  # and the flags


@pytest.mark.parametrize(
    ("backend", "spelling"),
    [("stand_in", "stand_in"), (None, "undefined"), ("lazy:stand_in", "lazy:stand_in")],
)
def test_nccl_averages_however_it_was_asked_for(backend: str | None, spelling: str) -> None:
    run_ranks(check_average, 2, backend, spelling)


# --- what is asked of offloaded parameters --------------------------------------------------------


def branches_on(device: torch.device) -> nn.Module:
    model = make(Branches)
    return shard_units(model, [], mesh=mesh_on(device, (2,)), **offloaded())


def numbers_of(device: torch.device) -> list[Any]:
    weight = branches_on(device).always.weight.detach()
    same = torch.equal(weight, weight.clone()), torch.equal(weight, weight + 1)
    results = [weight.sum(), weight.mean(), weight.max(), weight.amin(), weight.norm()]
    return [*same, *(result.item() for result in results), (weight == weight).all().item()]


def check_numbers() -> None:
    found, expected = on_both(numbers_of)
    assert found == pytest.approx(expected)


def test_offloaded_parameters_give_the_numbers_of_the_whole() -> None:
    run_ranks(check_numbers, 2)


def moved(device: torch.device) -> Tensors:
    weight = branches_on(device).always.weight.detach()
    mesh, ragged = weight.device_mesh, weight.placements
    ways = {
        "whole": weight.full_tensor(),
        "replicated": weight.redistribute(placements=[Replicate()]).to_local(),
        "by rows": weight.redistribute(placements=[Shard(0)]).to_local(),
        "by columns": weight.redistribute(placements=[Shard(1)]).to_local(),
    }
    assert all(each.device.type == "cpu" for each in ways.values())
    whole = torch.arange(16.0).view(4, 4)  # torch takes it to the device of the mesh
    distributed = distribute_tensor(whole, mesh, ragged).full_tensor()
    assert distributed.device.type == device.type
    return {**ways, "distributed": distributed.cpu()}


def check_moves() -> None:
    found, expected = on_both(moved)
    assert_bit_equal(found, expected)


def test_offloaded_parameters_move_and_are_on_the_cpu_again() -> None:
    run_ranks(check_moves, 2)


def drawn(device: torch.device) -> Tensors:
    weight = branches_on(device).always.weight.detach()
    torch.manual_seed(dist.get_rank())
    return {"normal": weight.normal_().full_tensor()}


def check_random() -> None:
    found, expected = on_both(drawn)
    assert_bit_equal(found, expected)


def test_offloaded_parameters_are_drawn_as_those_on_gloo() -> None:
    run_ranks(check_random, 2)


def unscaled(device: torch.device) -> list[Tensors]:
    """By a ``GradScaler``: infinity on the last rank alone is found on all."""
    model = branches_on(device)
    results = []
    for value in (1.0, float("inf")):
        factor = value if dist.get_rank() == 1 else 1.0
        model(torch.full((2, 4), factor, device=device), "a").sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found_inf, scale = torch.zeros(1), torch.full((1,), 0.5)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale)
        results.append({"found": found_inf, "first": grads[0].full_tensor()})
        model.zero_grad()
    return results


def check_scaler() -> None:
    found, expected = on_both(unscaled)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=0, equal_nan=True)
    assert [each["found"].item() for each in found] == [0.0, 1.0]


def test_all_ranks_find_the_infinity_in_offloaded_gradients_of_one() -> None:
    run_ranks(check_scaler, 2)


def check_full_states() -> None:
    with nccl_like_world():
        model, other = branches_on(DEVICE), branches_on(DEVICE)
        with torch.no_grad():
            other.always.weight.zero_()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, state, options=options)
        assert_bit_equal(full_parameters(other), full_parameters(model))
        plain = dict(make(Branches).named_parameters())
        assert_bit_equal(full_parameters(other), {n: p.detach() for n, p in plain.items()})


def test_full_state_dicts_of_offloaded_parameters_are_gathered_and_sent() -> None:
    run_ranks(check_full_states, 2)


# --- meshes with backends of their own ------------------------------------------------------------


def train_on(mesh: DeviceMesh, device: torch.device) -> tuple[Any, Tensors]:
    model = make(Branches)
    shard_units(model, [], mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs_of(step, dist.get_rank(), 4).to(device), "a", "b", "c").sum().backward()
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    (comm,) = comms_of(model)
    return comm, {name: value.cpu() for name, value in full_parameters(model).items()}


def check_mesh_of_gloo(overrides: bool) -> None:
    cpu = torch.device("cpu")
    _, expected = train_on(mesh_on(cpu, (2,)), cpu)
    with nccl_like_world():
        if overrides:
            mesh = init_device_mesh("cpu", (2,), backend_override={0: "gloo"})
        else:
            mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
        comm, found = train_on(mesh, cpu)
        assert comm.reduction == "all_to_all"
        for group in (comm.gather_group, comm.reduce_group):
            assert backend_name(group, "cpu") == "gloo"
    assert_bit_equal(found, expected)


@pytest.mark.parametrize("overrides", [True, False])
def test_a_mesh_of_gloo_beside_nccl_has_communicators_of_gloo(overrides: bool) -> None:
    run_ranks(check_mesh_of_gloo, 2, overrides)


def check_mesh_like_nccl() -> None:
    cpu = torch.device("cpu")
    _, expected = train_on(mesh_on(cpu, (2,)), cpu)
    with nccl_like_world("cpu:gloo"):
        mesh = init_device_mesh(DEVICE.type, (2,), backend_override={0: "stand_in"})
        comm, found = train_on(mesh, DEVICE)
        assert comm.reduction == "native"
        assert isinstance(comm.gather_group, NCCLLike)
        beside, on_cpu = train_on(mesh_on(cpu, (2,)), cpu)  # the same ranks on another device
        assert beside.reduction == "all_to_all"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_bit_equal(on_cpu, expected)


def test_a_mesh_like_nccl_beside_gloo_has_communicators_like_it() -> None:
    run_ranks(check_mesh_like_nccl, 2)


# --- the stand-ins themselves ---------------------------------------------------------------------


def check_what_is_refused() -> None:
    with nccl_like_world():
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(TypeError, match="not supported for NCCL"):
            dist.all_reduce(torch.ones(2, dtype=torch.int16, device=DEVICE))
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_reduce(torch.ones(2, 2, device=DEVICE)[:, 0])
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device=DEVICE) + torch.ones(2)
        with pytest.raises(AssertionError, match="ranks disagree"):
            dist.all_reduce(torch.ones(2 + dist.get_rank(), device=DEVICE))
        tensor = torch.ones(9, device=DEVICE)
        dist.all_reduce(tensor[1:])
        assert tensor.tolist() == [1.0] + [2.0] * 8
        world: Any = dist.group.WORLD
        assert world.misaligned == ["all-reduce SUM of 8 torch.float32"]


def test_the_stand_in_refuses_what_nccl_does() -> None:
    run_ranks(check_what_is_refused, 2)


# --- meta devices ---------------------------------------------------------------------------------


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = MLP(3, WIDTH)
    return shard_units(model, model.layers, mesh=mesh_on(DEVICE, (2,)), **offloaded())


def check_meta() -> None:
    with nccl_like_world("stand_in"):
        model = on_meta()
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        seen = []
        model.layers[1].register_forward_pre_hook(
            lambda module, _: seen.append(module.weight.device)
        )
        model(inputs_of(0, dist.get_rank(), WIDTH).to(DEVICE)).sum().backward()
        assert seen == [DEVICE]
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        assert all(param.grad is not None for param in model.parameters())
        with pytest.raises(RuntimeError, match="must be on the CPU"):
            on_meta().to_empty(device=DEVICE)


def test_offloaded_parameters_from_meta_are_used_on_the_device() -> None:
    run_ranks(check_meta, 2)


# --- what the outermost unit is given -------------------------------------------------------------


class Given(nn.Module):
    """Notes the devices of what it is given, and runs a layer that is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[str] = []

    def forward(self, batch: dict[str, Any], *, packed: Any) -> Tensor:
        tensors = [batch["x"], *batch["more"], packed.data, packed.batch_sizes]
        self.seen = [each.device.type for each in tensors]
        batch["new"] = batch["x"]
        return self.layer(batch["x"])


def check_inputs() -> None:
    with nccl_like_world():
        mesh, model = mesh_on(DEVICE, (2,)), Given()
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.ones(2, 3, requires_grad=True)
        batch: dict[str, Any] = {"x": x, "more": (torch.ones(1, dtype=torch.int64),)}
        packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
        out = model(batch, packed=packed)
        out.sum().backward()
        there = DEVICE.type
        assert model.seen == [there, there, there, "cpu"]  # batch sizes are always on the host
        assert batch["x"] is x
        assert x.grad is not None
        assert x.grad.device.type == "cpu"
        assert "new" in batch
        assert model.layer(torch.ones(2, 3)).device.type == there  # now it is the outermost


def test_inputs_of_the_outermost_unit_move_to_the_device_as_with_fsdp2() -> None:
    run_ranks(check_inputs, 2)


# --- moves ----------------------------------------------------------------------------------------


def devices_of_waiting(model: nn.Module) -> set[str]:
    """Where gradients are that wait for a later backward."""
    found = set()
    for unit in units_in(model).values():
        for group in unit.groups:
            waiting = group.gradients
            if waiting._filling is not None:
                found.add(waiting._filling.flat.device.type)
            if waiting._unsummed is not None:
                found.add(waiting._unsummed.device.type)
    return found


def gradients_after_moves(shape: tuple[int, ...], is_moved: bool) -> list[Tensor]:
    """Those of two backwards, with moves to the host and back between them and after them."""
    model: Any = make(MLP, 3, WIDTH)
    shard_units(model, model.layers, mesh=mesh_on(DEVICE, shape))
    switch = "all_reduce" if len(shape) > 1 else "gradient_sync"
    for step in range(2):
        getattr(model, f"set_requires_{switch}")(step == 1)
        model(inputs_of(step, dist.get_rank(), WIDTH).to(DEVICE)).square().sum().backward()
        if is_moved:
            model.to("cpu")
            assert devices_of_waiting(model) == ({"cpu"} if step == 0 else set())
            model.to(DEVICE)
    assert all(param.grad.device.type == DEVICE.type for param in model.parameters())
    return [full(param.grad).cpu() for param in model.parameters()]


def moves(shape: tuple[int, ...]) -> None:
    with nccl_like_world():
        expected = gradients_after_moves(shape, False)
        for own, other in zip(gradients_after_moves(shape, True), expected, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_gradients_that_wait_move_with_the_model(shape: tuple[int, ...]) -> None:
    run_ranks(moves, math.prod(shape), shape, timeout_s=60)
