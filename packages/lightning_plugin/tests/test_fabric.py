"""Fabric: the user owns the loop, and the strategy the sharding and the checkpoints."""

from __future__ import annotations

import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision, TorchCheckpointIO
from lightning.fabric.utilities.load import _lazy_load
from torch import nn
from torch.nn import functional as F

from vescale_fsdp import FSDPModule, RaggedTensor, RankMismatchError, unsharded
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFabricStrategy
from vescale_fsdp_lightning.consolidate import consolidate

from .lit import Block, full_parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def make_fabric(strategy: Any, **options: Any) -> lightning.fabric.Fabric:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(strategy: Any) -> tuple[Any, Any, Any]:
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, model, optimizer


def steps(fabric: Any, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Two micro-batches each, clipped by norm, then by value."""
    losses = []
    for step in range(first, last):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + fabric.global_rank)
            x = torch.randn(4, 12, generator=generator)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
                fabric.backward(loss)
            is_ours = isinstance(next(model.parameters()), RaggedTensor)
            has_gradients = any(p.grad is not None for p in model.parameters())
            assert has_gradients == (micro == 1 or not is_ours)
            losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.clip_gradients(model, optimizer, clip_val=0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Counter:
    """A scheduler or the like."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved_and_loaded(root: Path, kind: str, expected: list[float]) -> None:
    fabric, model, optimizer = set_up(VeScaleFabricStrategy(state_dict_type=kind))
    assert steps(fabric, model, optimizer, 0, 2) == pytest.approx(expected[:4], rel=1e-6)
    counter = Counter()
    counter.count = 7
    state = {"model": model, "optimizer": optimizer, "counter": counter, "step": 2, "other": "x"}
    for _ in range(2):  # the second time over the first
        fabric.save(root / kind, state)

    fabric, model, optimizer = set_up(VeScaleFabricStrategy())
    found: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "counter": Counter(),
        "step": 0,
    }
    rest = fabric.load(root / kind, found)
    assert rest == {"other": "x"}
    assert found["step"] == 2
    assert found["counter"].count == 7
    assert steps(fabric, model, optimizer, 2, 4) == pytest.approx(expected[4:], rel=1e-6)
    with pytest.raises(KeyError, match="'absent' is not in the checkpoint"):
        fabric.load(root / kind, {"model": model, "absent": 1})
    found = {"model": model, "absent": 1}
    fabric.load(root / kind, found, strict=False)
    assert found["absent"] == 1


def two_models(root: Path) -> None:
    """Each a root of its own, in one checkpoint."""
    fabric = make_fabric("vescale_fsdp")
    models = [fabric.setup_module(make_net()) for _ in range(2)]
    optimizers = [
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))
        for model, rate in zip(models, (0.1, 0.2), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(fabric, model, optimizer, 0, 1)
    state = {"a": models[0], "b": models[1], "of_a": optimizers[0], "of_b": optimizers[1]}
    fabric.save(root / "two", state)
    before = [full_parameters(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(fabric, model, optimizer, 1, 2)
    fabric.load(root / "two", state)
    for model, expected in zip(models, before, strict=True):
        for name, param in full_parameters(model).items():
            assert torch.equal(param, expected[name])
    assert not torch.equal(
        before[0]["_forward_module.head.bias"], before[1]["_forward_module.head.bias"]
    )


def one_of_two(root: Path) -> None:
    """What `two_models` has saved, loaded into one model and its optimizer, or both into others."""
    for kind in ("sharded", "full", "dcp"):
        fabric = make_fabric(VeScaleFabricStrategy(state_dict_type=kind))
        state: dict[str, Any] = {}
        for key in ("a", "b"):
            state[key] = fabric.setup_module(make_net())
            state[f"of_{key}"] = fabric.setup_optimizers(
                torch.optim.SGD(state[key].parameters(), lr=0.1, momentum=0.9)
            )
            steps(fabric, state[key], state[f"of_{key}"], 0, 1 if key == "a" else 2)
        path = root / f"one-of-two-{kind}"
        fabric.save(path, state)
        expected = {key: full_parameters(state[key]) for key in ("a", "b")}
        momentum = state["of_b"].optimizer.state_dict()["state"][0]["momentum_buffer"].full_tensor()

        model = fabric.setup_module(make_net())
        optimizer = fabric.setup_optimizers(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        fabric.load(path, {"b": model, "of_b": optimizer})
        for name, param in full_parameters(model).items():
            assert torch.equal(param, expected["b"][name])
            assert not torch.equal(param, expected["a"][name])
        found = optimizer.optimizer.state_dict()["state"][0]["momentum_buffer"].full_tensor()
        assert torch.equal(found, momentum)
        if kind == "sharded":
            in_one_file(fabric, path)
            path = root / f"one-of-two-{kind}.consolidated"
            fabric.load(path, {"a": model})
            for name, param in full_parameters(model).items():
                assert torch.equal(param, expected["a"][name])


def in_one_file(fabric: Any, folder: Path) -> None:
    if fabric.global_rank == 0:
        consolidate(folder, f"{folder}.consolidated")
    fabric.barrier()


def with_stock_fabric(root: Path, expected: list[float]) -> None:
    """Files of others, and files for others."""
    fabric, model, optimizer = set_up("ddp")
    steps(fabric, model, optimizer, 0, 2)
    fabric.save(root / "ddp", {"model": model, "optimizer": optimizer, "step": 2})
    in_one_file(fabric, root / "sharded")
    for source, strategy in (
        ("ddp", "vescale_fsdp"),
        ("full", "ddp"),
        ("sharded.consolidated", "ddp"),
    ):
        fabric, model, optimizer = set_up(strategy)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(root / source, state, strict=False)
        assert state["step"] == 2
        assert steps(fabric, model, optimizer, 2, 4) == pytest.approx(expected[4:], rel=1e-6)


def raw(root: Path) -> None:
    """``load_raw``: a state dict, or a sealed directory of one model."""
    fabric, model, _ = set_up("vescale_fsdp")
    if fabric.global_rank == 0:
        torch.save(torch.load(root / "full", weights_only=True)["model"], root / "raw")
    fabric.barrier()
    fabric.load(root / "full", {"model": model})
    expected = full_parameters(model)
    for path in (root / "raw", root / "sharded"):
        _, model, optimizer = set_up("vescale_fsdp")
        fabric.load_raw(path, model)
        for name, param in full_parameters(model).items():
            assert torch.equal(param, expected[name]), name
    with pytest.raises(ValueError, match=r"has none; fabric\.load"):
        fabric.load_raw(root / "dcp", model)
    with pytest.raises(NotImplementedError, match="load_raw of an optimizer"):
        fabric.load_raw(root / "raw", optimizer)


def whole_tensors(root: Path) -> None:
    """``load_state_dict`` of a file that every process has read, as without sharding."""
    _, model, _ = set_up("vescale_fsdp")
    expected = {name: each + 1 for name, each in make_net().state_dict().items()}
    for state in (expected, _lazy_load(root / "raw")):
        found = model.load_state_dict(state)
        assert not found.missing_keys
        for name, param in full_parameters(model).items():
            assert torch.equal(param, torch.detach(state[name.partition(".")[2]])), name
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
        model.load_state_dict({**expected, "head.bias": torch.ones(4)})


def whole_states() -> None:
    """``optimizer.load_state_dict`` of what DDP saves: training continues as with DDP."""
    losses = []
    runs = [set_up("ddp"), set_up("ddp"), set_up("vescale_fsdp")]
    steps(*runs[0], 0, 1)
    model_state, states = (each.state_dict() for each in runs[0][1:])
    for fabric, model, optimizer in runs[1:]:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(states))
        losses.append(steps(fabric, model, optimizer, 1, 3))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Renamed(Net):
    """Takes files in which its head was called otherwise, as litgpt's LoRA takes a base model's."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + f"output.{name}" in state_dict:
                state_dict[prefix + f"head.{name}"] = state_dict.pop(prefix + f"output.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def renamed_whole_tensors() -> None:
    """Modules inside of the model give entries other names, after the model's own hook."""
    model = make_fabric("vescale_fsdp").setup_module(nn.Sequential(Renamed()))
    expected = nn.Sequential(make_net()).state_dict()
    model.load_state_dict({key.replace("head", "output"): each for key, each in expected.items()})
    for name, param in full_parameters(model).items():
        assert torch.equal(param, expected[name.partition(".")[2]]), name


def in_one_call(expected: list[float]) -> None:
    """``fabric.setup(model, optimizer)``: with a scheduler, and with states made at once."""
    fabric, model = make_fabric("vescale_fsdp"), make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = steps(fabric, *fabric.setup(model, optimizer), 0, 4)
    assert found == steps(*set_up("vescale_fsdp"), 0, 4)
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(isinstance(param, RaggedTensor) for param in optimizer.state)
    runs = []
    for strategy in ("ddp", "vescale_fsdp"):
        fabric, model = make_fabric(strategy), make_net()
        one = torch.optim.Adagrad(model.blocks.parameters(), lr=1e-2, initial_accumulator_value=0.1)
        two = torch.optim.SGD([{"params": model.head.parameters()}], lr=1e-2)
        halving = torch.optim.lr_scheduler.ExponentialLR(two, 0.5)
        model, one, two, halving = fabric.setup(model, one, two, scheduler=halving)
        runs.append([])
        for step in range(3):
            x = torch.randn(2, 12, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            fabric.backward(loss)
            for each in (one, two, halving):
                each.step()
            for each in (one, two):
                each.zero_grad()
            runs[-1] += [loss.item(), two.param_groups[0]["lr"]]
    assert runs[0] == runs[1]


def mistakes(root: Path) -> None:
    fabric = make_fabric("vescale_fsdp")
    plain = make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"AdamW8bit needs .*setup_module"):
        fabric.setup(plain, AdamW8bit(plain.parameters()))
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        fabric.setup(make_net(), optimizer)
    model = fabric.setup_module(plain)
    with pytest.raises(ValueError, match="made before the model was sharded"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ValueError, match="there is no model"):
        fabric.save(root / "x", {"step": 1})
    for nothing in (None, {}):
        with pytest.raises(ValueError, match="needs the objects to load into"):
            fabric.load(root / "sharded", nothing)
    beside = nn.Linear(2, 2)  # the same on all ranks
    fabric.save(root / "beside", {"model": model, "ema": beside})
    with pytest.raises(ValueError, match=r"fabric\.save: '1\.weight', .* belong to no unit"):
        fabric.save(root / "x", {"model": nn.ModuleList([model.module, beside]), "other": beside})
    with pytest.raises(TypeError, match="takes no storage_options"):
        fabric.strategy.save_checkpoint(root / "x", {"model": model}, storage_options={})
    with pytest.raises(NotImplementedError, match="CheckpointIO"):
        make_fabric("vescale_fsdp", plugins=[TorchCheckpointIO()])
    with pytest.raises(NotImplementedError, match='state_dict_type="full"'):
        fabric.save(root / "x", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    fabric = make_fabric(VeScaleFabricStrategy(state_dict_type="full"))
    fabric.save(root / "x", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    if fabric.global_rank == 0:
        found = torch.load(root / "x")["model"]
        assert found
        assert all("bias" in name for name in found)
    with pytest.raises(ValueError, match="16-mixed"):
        make_fabric("vescale_fsdp", plugins=[MixedPrecision("16-mixed", "cpu")])


def compiled() -> None:
    """Fabric takes the wrapper off, has the model set up, and puts it on again."""
    fabric = make_fabric("vescale_fsdp")
    x = torch.randn(2, 12)
    plain = fabric.setup_module(make_net())(x)
    with warnings.catch_warnings():  # of Dynamo, which looks at gradients of what is no leaf
        warnings.simplefilter("ignore", UserWarning)
        model = fabric.setup_module(torch.compile(make_net(), backend="eager"))
        assert torch.equal(model(x), plain)
        fabric.backward(model(x).sum())
    assert all(param.grad is not None for param in model.parameters())


def quantized(expected: list[float]) -> None:
    strategy = VeScaleFabricStrategy(
        gather_codec={"dtype": "e4m3", "block": [4, 4]}, reduce_codec="int8"
    )
    fabric, model, optimizer = set_up(strategy)
    losses = steps(fabric, model, optimizer, 0, 4)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.1)


def empty_init() -> None:
    fabric = make_fabric("vescale_fsdp", precision="bf16-mixed")
    with fabric.init_module(empty_init=True):
        model = Net()
    assert model.head.weight.is_meta
    model = fabric.setup_module(model, move_to_device=False)  # the strategy knows where to
    loss = model(torch.ones(2, 12)).sum()
    fabric.backward(loss)
    assert loss.isfinite()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    units = [name for name, child in model.module.named_modules() if isinstance(child, FSDPModule)]
    assert units == ["", "blocks.0", "blocks.1"]


def fabric_scenarios(root: Path) -> None:
    fabric, model, optimizer = set_up("ddp")
    expected = steps(fabric, model, optimizer, 0, 4)
    for kind in ("sharded", "full", "dcp"):
        saved_and_loaded(root, kind, expected)
    two_models(root)
    one_of_two(root)
    with_stock_fabric(root, expected)
    raw(root)
    whole_tensors(root)
    renamed_whole_tensors()
    whole_states()
    in_one_call(expected)
    quantized(expected)
    compiled()
    mistakes(root)
    empty_init()


def test_fabric_trains_as_ddp_saves_loads_and_refuses(tmp_path: Path) -> None:
    run_ranks(fabric_scenarios, 2, tmp_path, timeout_s=100)


def save_alone(root: Path) -> str:
    fabric, model, optimizer = set_up(VeScaleFabricStrategy())
    steps(fabric, model, optimizer, 0, 1)

    def differently() -> None:
        if fabric.is_global_zero:
            fabric.save(root / "alone", {"model": model, "optimizer": optimizer})
        steps(fabric, model, optimizer, 1, 2)

    with pytest.raises(RankMismatchError) as error:
        differently()
    return str(error.value)


def test_a_save_in_the_first_process_alone_is_named_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "2")
    first, other = run_ranks(save_alone, 2, tmp_path, timeout_s=60)
    assert first.startswith("rank 1 did not come to compare the next step within 2 s")
    assert "Rank 0 is in the save of a checkpoint" in first
    step = "in the save of a checkpoint"
    assert re.search(f"^rank 1 (has waited|was cut off) .*The others: rank 0 .*{step}", other)


def set_up_a_copy(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    fabric, model, optimizer = set_up(strategy)
    steps(fabric, model, optimizer, 0, 2)
    with unsharded(model):
        net = copy.deepcopy(model.module)
    made, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return steps(fabric, made, optimizer, 2, 4), full_parameters(made.module)


def copies_beside_ddp() -> None:
    (losses, params), (expected_losses, expected) = map(set_up_a_copy, ("vescale_fsdp", "ddp"))
    # Some processors' kernels round differently by where a tensor begins.
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, param in expected.items():
        torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-7, msg=name)


def test_a_copy_of_a_module_can_be_set_up_again() -> None:
    run_ranks(copies_beside_ddp, 2)


def train_two_critics() -> None:
    fabric = make_fabric(VeScaleFabricStrategy())
    first, second = fabric.setup_module(make_net()), fabric.setup_module(make_net())
    x = torch.ones(4, 12)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "one backward has reached")
        fabric.backward((first(x) + second(x)).square().mean())


def test_two_critics_in_one_backward_are_not_warned_of() -> None:
    """``setup`` has seen that nothing is around them that is trained alone."""
    run_ranks(train_two_critics, 2)
