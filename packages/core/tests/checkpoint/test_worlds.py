"""What 1 to 4 ranks saved, 1 to 4 ranks load, cut at random: bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import CheckpointMismatchError, Granularity, checkpoint
from vescale_fsdp.testing import run_ranks

from .helpers import State, assert_same, everything, make, train


def random_cuts(seed: int) -> Granularity | None:
    """Another granularity for each run: rows, elements, whole tensors."""
    chance = random.Random(seed)
    kinds = [Granularity.elements(chance.randint(1, 9)), Granularity.rows(chance.randint(1, 3))]
    return chance.choice([None, Granularity.whole(), *kinds, *kinds])


class Loader:
    """A data loader's place: the same on all ranks, or each rank's own."""

    def __init__(self, own: bool) -> None:
        self.place = {"next": 7, "order": torch.arange(3)}
        if own:
            self.place = {"next": dist.get_rank(), "order": torch.full((2,), dist.get_rank())}

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state


Draws = tuple[float, Tensor]


def draw() -> Draws:
    return random.random(), torch.rand(3)


def train_and_save(root: Path) -> tuple[State, Draws]:
    size, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer = make(random_cuts(size), seed=size)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 30])
    train(model, optimizer, range(size + 1))
    random.seed(rank)
    torch.manual_seed(rank)
    schedule.step()
    stateful = {"schedule": schedule, "shared": Loader(False), "own": Loader(True)}
    extra = {"step": size, "who": rank, "nested": ({1: b"x"}, torch.ones(2) * rank)}
    checkpoint.save(root / f"by-{size}", model, optimizer, extra=extra, stateful=stateful)
    return everything(model, optimizer), draw()


def load_all(root: Path) -> dict[int, tuple[State, Draws]]:
    loaded: dict[int, tuple[State, Draws]] = {}
    size, rank = dist.get_world_size(), dist.get_rank()
    for saved_by in (1, 2, 3, 4):
        model, optimizer = make(random_cuts(10 * size + saved_by), seed=9)
        if saved_by % 2:  # into an optimizer that has states, and into one that has none
            train(model, optimizer, range(1))
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])
        loader = Loader(False)
        loader.place["next"] = -1
        path, stateful = root / f"by-{saved_by}", {"schedule": schedule, "shared": loader}
        extra = checkpoint.load(path, model, optimizer, stateful=stateful)
        loaded[saved_by] = everything(model, optimizer), draw()
        assert (extra["step"], extra["who"]) == (saved_by, 0)  # the first rank's
        assert extra["nested"][0] == {1: b"x"}
        assert torch.equal(extra["nested"][1], torch.zeros(2))
        assert (schedule.last_epoch, dict(schedule.milestones)) == (1, {1: 1, 30: 1})
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
        assert (loader.place["next"], loader.place["order"].tolist()) == (7, [0, 1, 2])
        own = {"own": Loader(True)}
        own["own"].place = {}
        if saved_by == size or saved_by == 1:
            checkpoint.load(path, model, stateful=own)
            mine = rank if saved_by == size else 0
            assert own["own"].place["next"] == mine
            assert own["own"].place["order"].tolist() == [mine, mine]
        elif size > saved_by:
            with pytest.raises(CheckpointMismatchError, match=r"stateful\.own differs between"):
                checkpoint.load(path, model, stateful=own)
            assert own["own"].place == {}
    return loaded


def test_all_world_sizes_load_what_all_world_sizes_saved(tmp_path: Path) -> None:
    saved = {size: run_ranks(train_and_save, size, tmp_path) for size in (1, 2, 3, 4)}
    for size in (1, 2, 3, 4):
        results = run_ranks(load_all, size, tmp_path)
        for saved_by in (1, 2, 3, 4):
            state, _ = saved[saved_by][0]
            seeded = []
            for rank, loaded in enumerate(results):
                assert_same(loaded[saved_by][0], state)
                number, tensor = loaded[saved_by][1]
                seeded.append(number)
                if rank < saved_by:  # its own generators
                    _, (expected, expected_tensor) = saved[saved_by][rank]
                    assert number == expected
                    assert torch.equal(tensor, expected_tensor)
            if saved_by > 1:  # no two ranks draw the same; one rank's state is everyone's
                assert len(set(seeded)) == size


class Frozen(nn.Module):
    """Dtypes and shapes that need care, some of them without elements."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn):
            value = torch.arange(6.0).view(2, 3).to(dtype)
            self.register_buffer("as_" + str(dtype).removeprefix("torch."), value)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(float("nan")))
        self.register_buffer("strided", torch.arange(6).view(2, 3).t())
        self.note: Any = {"text": "kept", "ring": (1, torch.arange(3))}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


def buffers_and_extra_state(root: Path) -> None:
    model = Frozen()
    checkpoint.save(root / "step", model)
    other = Frozen()
    for buffer in other.buffers():
        buffer.zero_()
    other.note = {"text": "", "ring": (0, torch.zeros(3, dtype=torch.int64))}
    checkpoint.load(root / "step", other)
    for (name, found), expected in zip(other.named_buffers(), model.buffers(), strict=True):
        assert bits(found) == bits(expected), name
    assert other.note["text"] == "kept"
    assert other.note["ring"][1].tolist() == [0, 1, 2]


def test_every_dtype_and_extra_states_come_back(tmp_path: Path) -> None:
    run_ranks(buffers_and_extra_state, 2, tmp_path)
