"""torch.distributed.checkpoint's own functions on sharded models: nothing converted or gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp import Granularity, RaggedTensor, fully_shard
from vescale_fsdp.optim import Muon
from vescale_fsdp.testing import run_ranks

from .helpers import State, assert_same, everything

MOST_BYTES = 500_000  # of plans: what each rank writes or reads, pickled
WIDTH = 512  # of the largest matrix: 1 MiB in fp32


class Mixed(nn.Module):
    """Parameters of all kinds: frozen, in bf16, a scalar, without elements; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 3, bias=False).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.up(x)))
        return self.down(hidden) * self.scale * self.gain.float().mean() + self.nothing.sum()


class Plain(nn.Sequential):
    """What stock FSDP2 can shard on any number of ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


Made = tuple[nn.Module, list[torch.optim.Optimizer]]


def make(kind: str, seed: int) -> Made:
    torch.manual_seed(seed)
    model = Plain() if kind in ("plain", "stock") else Mixed()
    mesh = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*[each for each in model.children() if isinstance(each, nn.Linear)], model):
        if kind == "stock":
            stock_fully_shard(module)
        else:
            fully_shard(module, mesh=mesh, granularity=Granularity.elements(1))
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind != "muon":
        return model, [torch.optim.Adam(trained, lr=0.05, amsgrad=True)]
    matrices = [param for param in trained if param.dim() == 2 and param.numel()]
    others = [param for param in trained if param.dim() != 2]
    return model, [Muon(matrices, lr=0.05), torch.optim.Adam(others, lr=0.05)]


def train(made: Made, steps: int) -> None:
    """The same batches on every rank, so that their number does not matter."""
    model, optimizers = made
    for number in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for buffer in model.buffers():
            buffer.add_(1)


def whole(made: Made) -> State:
    """All parameters, buffers and states, whole, by name."""
    model, optimizers = made
    state = everything(model, optimizers[0])
    for optimizer in optimizers[1:]:
        state |= {k: v for k, v in everything(model, optimizer).items() if "/" in k}
    return {name: value.detach().clone() for name, value in state.items()}


def state_of(made: Made) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(*made)
    return {"model": model_state, "optimizer": optimizer_state, "step": 3}


class Bytes(TorchDispatchMode):
    """The bytes that this rank gives to collectives or gets from them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            self.num_bytes += sum(
                each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor)
            )
        return func(*args, **(kwargs or {}))


def save(root: Path, kind: str) -> State:
    made = make(kind, seed=0)
    train(made, 2)
    state = state_of(made)
    with Bytes() as traffic:
        dcp.save(state, checkpoint_id=root / "saved")
    assert traffic.num_bytes < MOST_BYTES, traffic.num_bytes
    return whole(made)


def load(root: Path, kind: str) -> State:
    made = make(kind, seed=1)
    train(made, 1)
    state = {**state_of(made), "step": 0}
    with Bytes() as traffic:
        dcp.load(state, checkpoint_id=root)
    assert traffic.num_bytes < MOST_BYTES, traffic.num_bytes
    assert state["step"] == 3
    model_state, optimizer_state = state["model"], state["optimizer"]
    set_state_dict(*made, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return whole(made)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "saved_by", "loaded_by"),
    [
        ("mixed", 2, [("mixed", 4), ("hsdp", 4), ("mixed", 1)]),
        ("hsdp", 4, [("mixed", 2)]),
        ("muon", 2, [("muon", 4), ("muon", 1)]),
        ("plain", 2, [("stock", 4), ("stock", 1)]),
        ("stock", 2, [("plain", 4), ("plain", 1)]),
    ],
)
def test_other_ranks_load_what_was_saved(
    tmp_path: Path, kind: str, saved_by: int, loaded_by: list[tuple[str, int]]
) -> None:
    expected = run_ranks(save, saved_by, tmp_path, kind)[0]
    for other, world_size in loaded_by:
        assert_same(run_ranks(load, world_size, tmp_path / "saved", other)[0], expected)


# In the background


def stager(name: str) -> Any:
    if name == "blocking":
        return BlockingAsyncStager()
    # Shared memory is what a process in the background reads.
    return DefaultStager(StagingOptions(False, name == "shared", False, False))


def save_in_background(root: Path, name: str) -> State:
    made = make("mixed", seed=0)
    train(made, 2)
    expected = whole(made)
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(
        state_of(made), checkpoint_id=root, process_group=group, async_stager=stager(name)
    )
    train(made, 1)  # changes every parameter and state
    future.result()
    return expected


@pytest.mark.parametrize("name", ["default", "shared", "blocking"])
def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path, name: str) -> None:
    expected = run_ranks(save_in_background, 2, tmp_path / "saved", name)[0]
    found = run_ranks(load, 2, tmp_path / "saved", "mixed")[0]
    if name == "blocking":  # this one does not copy DTensors without dimensions
        found |= {key: each for key, each in expected.items() if key.split("/")[0] == "scale"}
    assert_same(found, expected)


def check_stages() -> None:
    """A staged copy is of the same kind, with memory of its own, that the next one takes again."""
    made = make("mixed", seed=0)
    tensors = made[0].state_dict()
    keep = stager("default")
    staged, again = keep.stage(tensors), keep.stage(tensors)
    assert staged.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if not isinstance(tensor, RaggedTensor):
            continue
        copied = staged[name]
        assert type(copied) is RaggedTensor
        assert copied.placements == tensor.placements
        assert copied.device_mesh == tensor.device_mesh
        assert torch.equal(copied.to_local(), tensor.to_local()), name
        if tensor.to_local().numel():
            assert copied.to_local().data_ptr() != tensor.to_local().data_ptr()
            assert copied.to_local().data_ptr() == again[name].to_local().data_ptr()


def test_staged_copies() -> None:
    run_ranks(check_stages, 2)


# One file


def test_dcp_to_torch_save(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, tmp_path, "mixed")[0]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
    assert_same(found, {name: expected[name] for name in found})
    assert "middle.weight" in found
    assert "seen" in found


def load_into_meta(root: Path) -> State:
    with torch.device("meta"):
        model = Plain()
    for module in (model[0], model[2], model):
        fully_shard(module, granularity=Granularity.elements(1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=root)
    model.load_state_dict(state["model"], assign=True)
    model(torch.ones(1, 5)).sum().backward()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch asks for its default device
def test_a_model_on_meta_is_filled(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, tmp_path, "plain")[0]
    found = run_ranks(load_into_meta, 2, tmp_path / "saved")[0]
    assert_same(found, {name: expected[name] for name in found})
