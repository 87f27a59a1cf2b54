"""Whole state dicts go in and out as they do with FSDP2: out by torch's functions, in by ours."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import Granularity, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, full_parameters

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Odd shapes, a buffer, a tie, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale: nn.Parameter | None = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.head(self.norm(torch.tanh(self.middle(self.embedding(tokens)))))
        return out if self.scale is None else out * self.scale


def make(seed: int, device: str = "cpu") -> Net:
    torch.manual_seed(seed)
    with torch.device(device):
        return Net()


def shard(model: Net, **options: Any) -> Net:
    fully_shard(model.middle, **options)
    return fully_shard(model, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    tokens = torch.randint(7, (4,), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().sum().backward()
    optimizer.step()


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(steps):
        step(model, optimizer, seed)
    return optimizer


def given(full: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """What each rank passes in: a copy, because torch changes the dict and keeps its scalars."""
    is_needed = not options.broadcast_from_rank0 or dist.get_rank() == 0
    return copy.deepcopy(full) if is_needed else {}


def check_values_arrive(options: StateDictOptions) -> None:
    plain, ours = make(0), shard(make(1))
    set_model_state_dict(ours, given(plain.state_dict(), options), options=options)
    assert_bit_equal(full_parameters(ours), full_parameters(plain))
    assert torch.equal(ours.norm.running_var, plain.norm.running_var)


def check_values_come_out() -> None:
    plain = make(0)
    out = get_model_state_dict(shard(make(0)), options=FULL)
    assert set(out) == set(plain.state_dict())
    assert all(torch.equal(out[name], value) for name, value in plain.state_dict().items())


def check_training_goes_on(options: StateDictOptions) -> None:
    plain, ours = make(0), shard(make(1))
    optimizers = trained(plain), torch.optim.AdamW(ours.parameters(), lr=0.01)
    set_model_state_dict(ours, given(plain.state_dict(), options), options=options)
    states = get_optimizer_state_dict(plain, optimizers[0])
    set_optimizer_state_dict(ours, optimizers[1], given(states, options), options=options)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        step(model, optimizer, 2)
    assert_bit_equal(full_parameters(ours), full_parameters(plain))


def check_optimizer_comes_out() -> None:
    plain, ours = make(0), shard(make(0))
    expected = get_optimizer_state_dict(plain, trained(plain))["state"]
    states = get_optimizer_state_dict(ours, trained(ours), options=FULL)["state"]
    for name, state in expected.items():
        assert_bit_equal(states[name], state)


def check_meta_model(shard_it: Callable[[Net], nn.Module]) -> Tensor:
    """Built on meta, values from rank 0 alone; the functions assign the tensors."""
    plain, model = make(0), make(1, "meta")
    for each in (plain, model):
        each.scale = None  # FSDP2 refuses parameters without dimensions
    model = shard_it(model)
    with warnings.catch_warnings():  # of torch, which asks for a device in an old way
        warnings.simplefilter("ignore", UserWarning)
        set_model_state_dict(model, given(plain.state_dict(), FROM_RANK_0), options=FROM_RANK_0)
    trained(model)
    return torch.cat([value.flatten() for value in full_parameters(model).values()])


def check_meta_models() -> None:
    def with_torch(model: Net) -> nn.Module:
        fully_shard_of_torch(model.middle)
        return fully_shard_of_torch(model)

    assert torch.equal(check_meta_model(shard), check_meta_model(with_torch))


def check_another_shape_is_refused() -> None:
    ours = shard(make(1))
    before = {name: value.clone() for name, value in full_parameters(ours).items()}
    wrong = {"middle.weight": torch.zeros(5, 6)}
    with pytest.raises((RuntimeError, ValueError), match=r"5, 6"):
        set_model_state_dict(ours, wrong, options=FULL)
    assert_bit_equal(full_parameters(ours), before)


def check_other_names(options: StateDictOptions) -> None:
    """All ranks hear of it, also those that have passed in nothing."""
    ours = shard(make(1))
    other = {**make(0).state_dict(), "more": torch.ones(2)}
    del other["middle.bias"]
    with pytest.raises(RuntimeError, match=r"middle.bias(.|\n)*more"):
        set_model_state_dict(ours, given(other, options), options=options)
    loose = dataclasses.replace(options, strict=False)
    missing, unexpected = set_model_state_dict(ours, given(other, options), options=loose)
    assert (missing, unexpected) == (["middle.bias"], ["more"])


def check_flat_states(options: StateDictOptions) -> None:
    flat = dataclasses.replace(options, flatten_optimizer_state_dict=True)
    out = StateDictOptions(flatten_optimizer_state_dict=True)
    plain, ours = make(0), shard(make(0))
    optimizers = trained(plain), torch.optim.AdamW(ours.parameters(), lr=0.01)
    states = get_optimizer_state_dict(plain, optimizers[0], options=out)
    set_optimizer_state_dict(ours, optimizers[1], given(states, options), options=flat)
    found = get_optimizer_state_dict(
        ours, optimizers[1], options=StateDictOptions(full_state_dict=True)
    )["state"]
    for name, expected in get_optimizer_state_dict(plain, optimizers[0])["state"].items():
        if dist.get_rank() == 0:
            assert_bit_equal(found[name], expected)


def check_several_optimizers(options: StateDictOptions) -> None:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *rest = model.parameters()
        return [torch.optim.AdamW([first]), torch.optim.SGD(rest, 0.1, momentum=0.9)]

    plain, ours = make(0), shard(make(0))
    before, after = two(plain), two(ours)
    for optimizer in before:
        step(plain, optimizer, 0)
    states = get_optimizer_state_dict(plain, before)
    set_optimizer_state_dict(ours, after, given(states, options), options=options)
    for old, new in zip(before, after, strict=True):
        for param, other in zip(plain.parameters(), ours.parameters(), strict=True):
            for key, value in old.state.get(param, {}).items():
                mine = new.state[other][key]
                whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
                assert torch.equal(whole, value), key


def check_states_of_some(options: StateDictOptions) -> None:
    """The optimizer has stepped, but one parameter had no gradient."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    torch.manual_seed(0)
    plain, ours = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    fully_shard(ours[0])
    fully_shard(ours)
    optimizers = torch.optim.AdamW(plain.parameters(), 0.1), adam(ours)
    plain(torch.ones(1, 3)).sum().backward()
    optimizers[0].step()
    states = get_optimizer_state_dict(plain, optimizers[0])
    set_optimizer_state_dict(ours, optimizers[1], given(states, options), options=options)
    for param, other in zip(plain.parameters(), ours.parameters(), strict=True):
        found = optimizers[1].state[other]["exp_avg"]
        assert type(found) is type(other.detach())
        assert torch.equal(found.full_tensor(), optimizers[0].state[param]["exp_avg"])


def check_sharded_tensors_are_not_sent() -> None:
    ours = shard(make(0))
    with pytest.raises(TypeError, match=r"'scale' is a DTensor: .* pass whole tensors"):
        set_model_state_dict(ours, ours.state_dict(), options=FROM_RANK_0)


def check_kinds_of_numbers() -> None:
    """Gloo sends few of them; no file of ours is needed to read what is plain."""
    model = nn.Linear(4, 4)
    for number, dtype in enumerate((torch.int16, torch.bool, torch.complex64)):
        model.register_buffer(f"b{number}", torch.zeros(3, dtype=dtype))
    fully_shard(model)
    state = {
        name: torch.ones(value.shape, dtype=value.dtype)
        for name, value in model.state_dict().items()
    }
    set_model_state_dict(model, given(state, FROM_RANK_0), options=FROM_RANK_0)
    assert all(model.get_buffer(f"b{number}").all() for number in range(3))
    rows = model.weight.detach().redistribute(placements=[Shard(0)])
    file = io.BytesIO()
    torch.save([rows, rows.sum()], file)
    assert b"vescale_fsdp" not in file.getvalue()


class Fused(Net):
    """Files have two halves of a weight, which a hook puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.register_load_state_dict_pre_hook(join_halves)


def join_halves(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    names = [f"{prefix}upper", f"{prefix}lower"]
    if names[0] in state_dict:
        state_dict[f"{prefix}weight"] = torch.cat([state_dict.pop(name) for name in names])


def check_whole_tensors(**options: Any) -> None:
    """What ``torch.load`` gives, on every rank."""
    expected, values = make(2).state_dict(), dict(make(2).named_parameters())
    ours = shard(make(1), **options)
    params = dict(ours.named_parameters())
    assert ours.load_state_dict(expected) == ([], [])
    assert_bit_equal(full_parameters(ours), values)
    assert all(params[name] is param for name, param in ours.named_parameters())
    ours(torch.arange(7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"size mismatch for middle.weight"):
        ours.load_state_dict({**expected, "middle.weight": torch.zeros(5, 6)})
    on_meta = shard(make(1, "meta"), **options)
    on_meta.load_state_dict(make(2).state_dict(), assign=True)  # torch leaves a mark in it
    assert_bit_equal(full_parameters(on_meta), values)
    torch.manual_seed(1)
    fused = shard(Fused(), **options)
    expected["middle.upper"], expected["middle.lower"] = expected.pop("middle.weight").split([2, 3])
    fused.load_state_dict(expected)
    assert_bit_equal(full_parameters(fused), values)


def in_all_ways() -> None:
    check_whole_tensors()
    for row in ("ddp", "zero1"):
        check_whole_tensors(sharding=row)
    check_whole_tensors(shard_placement_fn=lambda param: Shard(0) if param.dim() else None)


def test_each_rank_takes_its_part_of_whole_tensors() -> None:
    run_ranks(in_all_ways, 2)


def sent_by(rank: int, value: object) -> Any:
    """What this rank reads from a file that ``rank`` has written."""
    file = io.BytesIO()
    torch.save(value, file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    return torch.load(io.BytesIO(files[rank]), weights_only=False)


def load_the_file_of_rank_0(**options: Any) -> list[str | None]:
    """With Shard(0) alone, and with ragged parts."""
    told: list[str | None] = []
    for model in (nn.Linear(4, 4), nn.Linear(4, 3)):
        sharded = fully_shard(model, **options)
        before, state = full_parameters(sharded), sharded.state_dict()
        first, own = sent_by(0, state), sent_by(dist.get_rank(), state)
        try:
            sharded.load_state_dict(first)
            told.append(None)
        except ValueError as error:
            told.append(str(error))
        sharded.load_state_dict(own)
        assert_bit_equal(full_parameters(sharded), before)
    return told


def test_parts_of_another_rank_are_refused() -> None:
    """A script for DDP saves on rank 0, and all load that file. FSDP2 mixes the parts silently."""
    first, second = run_ranks(load_the_file_of_rank_0, 2)
    assert first == [None, None], "it has its own parts"
    for told in second:
        assert told is not None
        assert "is the part of the rank at (0,) of the mesh, expected" in told


def files_of_another_replica() -> list[str | None]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return load_the_file_of_rank_0(mesh=mesh)


def test_parts_of_another_replica_are_the_same() -> None:
    assert run_ranks(files_of_another_replica, 2) == [[None, None]] * 2


def with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    check_whole_tensors(mesh=mesh)


def test_so_do_replicas() -> None:
    run_ranks(with_replicas, 4)


def on_two_ranks() -> None:
    for options in (FULL, FROM_RANK_0):
        check_values_arrive(options)
        check_training_goes_on(options)
        check_other_names(options)
        check_flat_states(options)
        check_several_optimizers(options)
        check_states_of_some(options)
    check_sharded_tensors_are_not_sent()
    check_kinds_of_numbers()
    check_values_come_out()
    check_optimizer_comes_out()
    check_meta_models()
    check_another_shape_is_refused()


def on_two_axes() -> None:
    """Replicas of shards, then tensor parallel inside of shards."""
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def check(make_sharded: Callable[[nn.Module], nn.Module]) -> None:
        for options in (FULL, FROM_RANK_0):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
            torch.manual_seed(1)
            ours = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
            ours = make_sharded(ours)
            set_model_state_dict(ours, given(plain.state_dict(), options), options=options)
            assert_bit_equal(full_parameters(ours), full_parameters(plain))

    def tensor_parallel(model: nn.Module) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mixed["tensor"], plan)
        return fully_shard(model, mesh=mixed["data"])

    check(lambda model: fully_shard(model, mesh=replicas, granularity=Granularity.rows(3)))
    check(tensor_parallel)


def test_full_state_dicts_go_in_and_out() -> None:
    run_ranks(on_two_ranks, 2)


def test_full_state_dicts_go_in_on_two_axes() -> None:
    run_ranks(on_two_axes, 4)
