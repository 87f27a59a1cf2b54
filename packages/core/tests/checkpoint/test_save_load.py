from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import (
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    Granularity,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.checkpoint import parts, saving
from vescale_fsdp.testing import run_ranks

from .helpers import State, everything, make, train


def train_and_save(path: Path) -> tuple[State, State]:
    model, optimizer = make()
    train(model, optimizer, range(3))
    checkpoint.save(path, model, optimizer, extra={"step": 3, "losses": [1.0, 0.5]}).wait()
    saved = everything(model, optimizer)
    train(model, optimizer, range(3, 6))
    return saved, everything(model, optimizer)


def load_and_train(path: Path, granularity: Granularity | None) -> tuple[State, State, Any]:
    model, optimizer = make(granularity, seed=1)
    extra = checkpoint.load(path, model, optimizer)
    loaded = everything(model, optimizer)
    train(model, optimizer, range(3, 6))
    return loaded, everything(model, optimizer), extra


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    path = tmp_path_factory.mktemp("checkpoints") / "step-3"
    state, later = run_ranks(train_and_save, 2, path)[0]
    return path, state, later


@pytest.mark.parametrize(
    ("world_size", "granularity"),
    [(2, None), (2, Granularity.rows(2)), (1, None), (3, Granularity.whole())],
)
def test_load_on_any_number_of_ranks_and_with_any_cuts_is_bitwise(
    saved_on_two: tuple[Path, State, State], world_size: int, granularity: Granularity | None
) -> None:
    path, state, later = saved_on_two
    loaded, trained, extra = run_ranks(load_and_train, world_size, path, granularity)[0]
    assert extra == {"step": 3, "losses": [1.0, 0.5]}
    assert loaded.keys() == state.keys()  # no state for what never had a gradient
    assert "unused.weight/exp_avg" not in loaded
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name
    for name, value in later.items():  # the mean over 3 equal gradients may differ by a rounding
        torch.testing.assert_close(
            trained[name], value, rtol=0, atol=1e-6 if world_size == 3 else 0, msg=name
        )


def save_twice(path: Path) -> list[str]:
    model, optimizer = make()
    checkpoint.save(path, model, optimizer)
    before = sorted(str(file.relative_to(path)) for file in path.iterdir())
    with pytest.raises(FileExistsError, match="never overwritten"):
        checkpoint.save(path, model, optimizer)
    assert sorted(str(file.relative_to(path)) for file in path.iterdir()) == before
    return before


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    files = run_ranks(save_twice, 2, tmp_path / "once")[0]
    assert files == ["manifest.json", "rank-00000.bin", "rank-00001.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["once"]  # nothing partial is left


def load_from_nowhere(path: Path) -> str:
    model, optimizer = make()
    before = everything(model, optimizer)
    with pytest.raises(CheckpointIncompleteError) as error:
        checkpoint.load(path, model, optimizer)
    after = everything(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(error.value)


def test_a_save_that_was_not_finished_is_not_loaded_and_named(tmp_path: Path) -> None:
    stage = f"step-1.tmp-{'0' * 32}"
    (tmp_path / stage).mkdir()
    for message in run_ranks(load_from_nowhere, 2, tmp_path / "step-1"):
        assert "no whole checkpoint" in message
        assert f"{stage} is a save that was not finished" in message


def load_without_optimizer(root: Path) -> tuple[str, str]:
    model, optimizer = make()
    checkpoint.save(root / "model-only", model)
    with pytest.raises(CheckpointIncompleteError) as no_state:
        checkpoint.load(root / "model-only", model, optimizer)
    deeper = nn.Sequential(model, fully_shard(nn.Linear(2, 2)))
    with pytest.raises(CheckpointIncompleteError) as no_entry:
        checkpoint.load(root / "model-only", deeper)
    return str(no_state.value), str(no_entry.value)


def test_entries_that_are_not_there_are_named(tmp_path: Path) -> None:
    for no_state, no_entry in run_ranks(load_without_optimizer, 2, tmp_path):
        assert "optimizer.0" in no_state
        assert "model.1.bias" in no_entry or "model.0" in no_entry


def several_optimizers(root: Path) -> bool:
    model, _ = make()
    names = dict(model.named_parameters())
    first = torch.optim.SGD([names["scale"]], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.layers.parameters(), lr=0.1)
    both = {"scale": first, "layers": second}
    model(torch.ones(2, 5)).sum().backward()
    first.step()
    second.step()
    expected = everything(model, first) | everything(model, second)
    checkpoint.save(root / "two", model, both)
    model(torch.ones(2, 5)).sum().backward()
    first.step()
    second.step()
    checkpoint.load(root / "two", model, both)
    found = everything(model, first) | everything(model, second)
    assert dist.get_world_size() == 2
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_several_optimizers_by_name(tmp_path: Path) -> None:
    assert all(run_ranks(several_optimizers, 2, tmp_path))


class Held:
    """A state with tensors."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_two_things_of_one_name_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    numbers: Any = {name: torch.optim.SGD(model.parameters(), lr=1.0) for name in (0, "0")}
    with pytest.raises(CheckpointValueError, match=r"'optimizer\.0' is there twice"):
        checkpoint.save(tmp_path / "a", model, numbers)
    held = {"a": Held({"b": {"t": torch.ones(2)}}), "a.b": Held({"t": torch.zeros(2)})}
    with pytest.raises(
        CheckpointValueError, match=r"two tensors would be called 'stateful\.a\.b\.t'"
    ):
        checkpoint.save(tmp_path / "a", model, stateful=held)
    assert list(tmp_path.iterdir()) == []


class Scaled(nn.Module):
    """A state that has its form after the first step, as the scales of Transformer Engine."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize(
    "before", [None, torch.empty(0, dtype=torch.uint8), torch.zeros(5), {"scale": 1.0}]
)
def test_extra_states_of_another_form_are_loaded_as_they_were(
    tmp_path: Path, before: Any, dtype: torch.dtype
) -> None:
    saved = Scaled(torch.arange(5, dtype=dtype))
    for name, other in (("tensor", saved), ("none", Scaled(None))):
        checkpoint.save(tmp_path / name, other)
        checkpoint.export_dcp(tmp_path / f"{name}-dcp", other)
    for suffix, load in (("", checkpoint.load), ("-dcp", checkpoint.import_dcp)):
        model = Scaled(before)
        load(tmp_path / f"tensor{suffix}", model)
        torch.testing.assert_close(model.extra, saved.extra, rtol=0, atol=0)
        load(tmp_path / f"none{suffix}", model)
        assert model.extra is None


def test_a_buffer_that_shares_elements_is_said_before_the_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(4).expand(3, 4))
    checkpoint.save(tmp_path / "a", model)
    with pytest.raises(CheckpointMismatchError, match=r"'model\.mask' is expanded here"):
        checkpoint.load(tmp_path / "a", model)
    model.mask = model.mask.clone()
    checkpoint.load(tmp_path / "a", model)


def test_a_save_that_waits_for_a_lost_rank_is_left() -> None:
    forever, handle = threading.Event(), saving.SaveHandle(Path("none"))
    handle._start(forever.wait)
    saving._last = handle
    saving.leave_saves(0.1)
    saving.finish_saves()()  # returns: it is forgotten
    assert not handle.is_done
    forever.set()


def leaves_a_save(root: Path) -> bool:
    """Rank 1 does not answer in a save in the background. Returns whether rank 0's thread ends."""
    model, forever, wrote = nn.Linear(4, 4), threading.Event(), parts.write_items

    def hang(*args: Any) -> Any:
        forever.wait()
        return wrote(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(parts, "write_items", hang)
        handle = checkpoint.save(root / "saved", model, async_=True)
        if dist.get_rank() == 0:
            saving.leave_saves(0.5)
            assert handle._thread is not None
            handle._thread.join(20.0)
            (root / "left").touch()
        while not (root / "left").exists():
            time.sleep(0.01)
        forever.set()
        saving.leave_saves(20.0)
    return handle.is_done


def test_a_save_that_is_left_ends(tmp_path: Path) -> None:
    assert run_ranks(leaves_a_save, 2, tmp_path) == [True, True]
    assert not (tmp_path / "saved").exists()


def test_a_file_of_torch_save_is_named_with_what_loads_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for look in (lambda path: checkpoint.load(path, model), checkpoint.verify):
        with pytest.raises(
            CheckpointIncompleteError,
            match=r"model\.pt; it is a file.*load_state_dict\(torch\.load",
        ):
            look(tmp_path / "model.pt")
