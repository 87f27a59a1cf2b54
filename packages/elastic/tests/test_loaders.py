"""The loader for loops that others drive takes the samples that `Run.batches` takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

import vescale_fsdp_elastic as elastic
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import ElasticOptions, MicroBatches, StepLoader
from vescale_fsdp_elastic.order import Order

from .helpers import Losses, Numbers, Stop, make, train


def micro_batches(rank: int, ranks: int, first: int = 0) -> MicroBatches:
    return MicroBatches(Order(100, 0), 11, 3, rank, ranks, lambda: first)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_steps_have_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    found = [micro_batches(rank, ranks, first=2) for rank in range(ranks)]
    each = found[0].num_each
    assert all(len(one) == 9 * each for one in found)  # 100 // 11 steps
    lists = [list(one) for one in found]
    expected = list(Order(100, 0).indices(22, 121))
    for step in range(9):
        taken = [i for one in lists for part in one[step * each : (step + 1) * each] for i in part]
        assert taken == expected[step * 11 : (step + 1) * 11]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_make_the_mean_over_the_global_batch(ranks: int) -> None:
    values, total = torch.arange(11.0), 0.0
    for rank in range(ranks):
        own = micro_batches(rank, ranks)
        order = {sample: place for place, sample in enumerate(Order(100, 0).indices(0, 11))}
        for part, weight in zip(list(own)[: own.num_each], own.weights(), strict=True):
            mean = float(values[[order[sample] for sample in part]].mean())
            total += mean * weight / own.num_each / ranks
    assert total == pytest.approx(5.0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)

    def __len__(self) -> int:
        return 4


class Own(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Own(Numbers(), batch_size=2), r"got a .*\.Own"),
        (DataLoader(Stream(), batch_size=2), "a loader of a Stream"),
        (
            DataLoader(Numbers(), 2, sampler=WeightedRandomSampler([1.0] * 100, 100)),
            "a loader with a WeightedRandomSampler",
        ),
        (DataLoader(Numbers(), batch_size=None), "the batch sampler NoneType"),
        ([1, 2], r"got a builtins\.list"),
    ],
)
def test_other_loaders_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        StepLoader.like(loader, 4, 0, 1, int)


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ({"shuffle": True}, 5),
        ({"shuffle": False}, None),
        ({"sampler": DistributedSampler(Numbers(), 2, 0, seed=9)}, 9),
        ({"sampler": DistributedSampler(Numbers(), 2, 0, shuffle=False)}, None),
    ],
)
def test_the_sampler_says_whether_samples_are_shuffled(
    options: dict[str, Any], seed: int | None
) -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=0, **options)
    made = StepLoader.like(loader, 4, 0, 1, int, default_seed=5)
    assert made.micro_batches.order.seed == seed
    assert len(made) == 50  # 25 steps of 2 micro-batches


def test_workers_load_the_same() -> None:
    def batches(num_workers: int) -> list[torch.Tensor]:
        loader = DataLoader(Numbers(), batch_size=20, shuffle=True, num_workers=num_workers)
        return [x for x, _ in StepLoader.like(loader, 50, 0, 1, lambda: 3)]

    alone, with_workers = batches(0), batches(2)
    assert len(alone) == 6  # two steps of 16, 17 and 17 samples
    assert all(map(torch.equal, alone, with_workers))


def driven(root: Path, until: int, stop_at: int | None) -> tuple[Losses, str]:
    """A loop that counts micro-batches itself, as a Trainer does."""
    model, optimizer, schedule = make()
    losses: Losses = {}
    options: dict[str, Any] = {"every": 2, "every_on_disk": None, "signals": ()}
    memory = root / f"host{dist.get_rank()}"
    with (
        contextlib.suppress(Stop),
        elastic.training(
            root / "run",
            model,
            optimizer,
            stateful={"s": schedule},
            memory_directory=memory,
            **options,
        ) as run,
    ):
        run.before_save = lambda: run.extra.update(seen=run.step)
        loader = StepLoader.like(
            DataLoader(Numbers(), batch_size=3, shuffle=True),
            12, dist.get_rank(), dist.get_world_size(), lambda: run.step,
        )  # fmt: skip
        assert run.extra == ({} if run.source == "start" else {"seen": run.step})
        batches = iter(loader)
        while run.step < until:
            if run.step == stop_at:
                run._keeper.finish()
                raise Stop
            total = torch.zeros(())
            for weight in loader.micro_batches.weights():
                x, y = next(batches)
                loss = nn.functional.mse_loss(model(x), y) * weight / loader.micro_batches.num_each
                loss.backward()
                total += loss.detach()
            dist.all_reduce(total)
            losses[run.step] = float(total) / dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.made(12, is_last=run.step + 1 == until)
    return losses, run.source


def plain(root: Path, until: int) -> Losses:
    return train(root, until)[0]


def test_a_loop_that_others_drive_has_the_losses_of_run_batches(tmp_path: Path) -> None:
    expected = run_ranks(plain, 2, tmp_path / "plain", 7)[0]
    first, _ = run_ranks(driven, 3, tmp_path / "driven", 7, 4)[0]
    second, source = run_ranks(driven, 2, tmp_path / "driven", 7, None)[0]
    assert source == "memory"
    assert min(second) == 4
    assert first | second == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"directory": "runs"}, "a mapping with directory and global_batch"),
        ({"directory": "runs", "global_batch": 4, "interval": 2}, "of every, replicas"),
        ({"directory": "runs", "global_batch": 0}, "global_batch=0.*at least 1"),
        ({"directory": "runs", "global_batch": 4, "keep_last": 1}, "keep_last=1.*at least 2"),
        ({"directory": "runs", "global_batch": 4.0}, r"global_batch=4\.0"),
        ("runs", "expected an ElasticOptions"),
    ],
)
def test_options_that_do_not_work_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticOptions.of(value)


def test_options_are_the_arguments_of_training() -> None:
    options = ElasticOptions.of({"directory": "runs", "global_batch": 4, "every_on_disk": None})
    assert options == ElasticOptions(directory="runs", global_batch=4, every_on_disk=None)
    assert options.arguments() == {
        "every": 10,
        "replicas": 1,
        "every_on_disk": None,
        "keep_last": 2,
        "memory_directory": None,
    }
