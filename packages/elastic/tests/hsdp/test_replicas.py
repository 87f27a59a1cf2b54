"""Two replicas of two ranks each: one is lost, comes back, or misses a sum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import RankMismatchError, checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic.hsdp.lanes import Lane, LaneError
from vescale_fsdp_elastic.order import Order, parts

WIDTH, GLOBAL_BATCH, UNTIL = 6, 14, 14  # 4, 3, 4, 3 samples: the replicas have 7 each


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """100 samples that depend on their index only."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum().reshape(1)


def make(seed: int, hidden: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
        nn.Linear(hidden, 1),
    )  # fmt: skip
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def make_sharded(seed: int, hidden: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(seed, hidden)
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def split(root: Path, size: int) -> int:
    """Replace the default group by one of each ``size`` ranks. Returns the number of this one."""
    number, num_all = dist.get_rank(), dist.get_world_size()
    replica, rank = divmod(number, size)
    # Not a barrier: the last rank may still be in it when the first destroys the group.
    (root / f"ready-{number}").touch()
    while len([*root.glob("ready-*")]) < num_all:
        time.sleep(0.01)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/world-{replica}", rank=rank, world_size=size
    )
    return replica


class Result(NamedTuple):
    losses: dict[int, float]
    present: dict[int, tuple[int, ...]]
    digest: str
    source: str
    exchanges: int


class Stop(Exception):
    """What ends a replica."""


Fault = Callable[[elastic.ReplicaRun, int], None]


def train(root: Path, replica: int, until: int = UNTIL, fault: Fault | None = None) -> Result:
    model, optimizer = make_sharded(seed=replica)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    losses, present = {}, {}
    with elastic.replicas(
        root / "run", model, optimizer, replica=replica, num_replicas=2, timeout_s=20.0,
        stateful={"schedule": schedule}, every=100, every_on_disk=None, signals=(),
        memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=2, until=until):
            if fault is not None:
                fault(run, step.number)
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            losses[step.number], present[step.number] = step.mean_loss(), run.present
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        quorum = run._exchange.quorum
        assert quorum is not None
        source, number = run.source, quorum.number
    return Result(losses, present, digest(model, optimizer), source, number)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's shards, and of all states of the optimizer."""
    total = hashlib.sha256()
    for param in model.parameters():
        states = [each for each in optimizer.state[param].values() if torch.is_tensor(each)]
        for each in (param, *states):
            local = each.to_local() if hasattr(each, "to_local") else each
            total.update(local.detach().numpy().tobytes())
    return total.hexdigest()


def reference(present: Mapping[int, tuple[int, ...]]) -> dict[int, float]:
    """One process that takes the samples of who is there."""
    model, optimizer = make(seed=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    order = Order(100, 0)
    losses = {}
    for step, replicas in sorted(present.items()):
        ranks = [2 * replica + rank for replica in replicas for rank in range(2)]
        positions = [
            position
            for rank in ranks
            for part in parts(step * GLOBAL_BATCH, GLOBAL_BATCH, rank, 4, 2)
            for position in range(part.start, part.start + part.num_samples)
        ]
        data = [Numbers()[next(order.indices(each, each + 1))] for each in positions]
        x, y = (torch.stack(each) for each in zip(*data, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses[step] = float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def check(results: list[Result], present: Mapping[int, tuple[int, ...]]) -> None:
    """Both replicas have the same bits at the end, and the losses are those of one process."""
    for rank in range(2):
        assert results[rank].digest == results[2 + rank].digest
    expected = reference(present)
    for result in results:
        for step, loss in result.losses.items():
            assert loss == pytest.approx(expected[step], abs=1e-6), step


def undisturbed(root: Path) -> Result:
    return train(root, split(root, 2))


def test_replicas_have_the_same_bits_from_the_first_step_on(tmp_path: Path) -> None:
    results = run_ranks(undisturbed, 4, tmp_path)
    present = dict.fromkeys(range(UNTIL), (0, 1))
    assert [each.present for each in results] == [present] * 4
    assert [each.source for each in results] == ["start", "start", "replica", "replica"]
    check(results, present)


def leaves_and_returns(root: Path) -> Result:
    """Replica 0, whose state is the first one, ends before step 4, and comes again."""

    def leave(run: elastic.ReplicaRun, step: int) -> None:
        if step == 4:
            raise Stop

    def wait(run: elastic.ReplicaRun, step: int) -> None:
        """Replica 1 waits before step 8 until replica 0 wants to join."""
        if step == 8 and run._inside.ranks.is_first:
            alone.touch()
            while not run._pulse.is_wished:
                time.sleep(0.01)

    replica, alone = split(root, 2), root / "alone"
    if replica == 1:
        return train(root, 1, fault=wait)
    with pytest.raises(Stop):
        train(root, 0, fault=leave)
    while not alone.exists():
        time.sleep(0.01)
    return train(root, 0)


def test_a_replica_leaves_and_returns(tmp_path: Path) -> None:
    results = run_ranks(leaves_and_returns, 4, tmp_path)
    present = results[2].present
    expected = {step: (1,) if 4 <= step <= 8 else (0, 1) for step in range(UNTIL)}
    assert present == expected
    assert [min(each.losses) for each in results] == [9, 9, 0, 0]
    assert [each.source for each in results] == ["replica"] * 4
    check(results, present)


def misses_sums(root: Path) -> Result:
    """In step 3 the sum does not arrive on one rank; in step 6 it is broken for all."""
    number, done = [0], list[int]()
    whole = Lane.sum

    def sum_(self: Lane, tensor: torch.Tensor, gives_up: Any) -> None:
        if tensor.dtype == torch.float64 and number[0] == 6 and 6 not in done:
            done.append(6)
            self.close()
            raise LaneError("broken before")
        whole(self, tensor, gives_up)
        is_data = tensor.dtype == torch.float32 and tensor.numel() > 1
        if is_data and number[0] == 3 and 3 not in done:
            done.append(3)
            self.close()
            raise LaneError("broken after")

    def count(run: elastic.ReplicaRun, step: int) -> None:
        number[0] = step

    is_last = dist.get_rank() == 3
    replica = split(root, 2)
    if not is_last:
        return train(root, replica)
    with mock.patch.object(Lane, "sum", sum_):
        return train(root, replica, fault=count)


def test_a_sum_that_has_not_arrived_everywhere_is_handed_over_or_repeated(tmp_path: Path) -> None:
    results = run_ranks(misses_sums, 4, tmp_path)
    present = dict.fromkeys(range(UNTIL), (0, 1))
    assert [each.present for each in results] == [present] * 4
    # Quorum 1, one after step 3, one in step 6, and the end.
    assert [each.exchanges for each in results] == [4] * 4
    check(results, present)


def of_another_width(root: Path) -> str:
    replica = split(root, 1)
    model, optimizer = make_sharded(0, hidden=16 + 8 * replica)
    try:
        with elastic.replicas(
            root / "run", model, optimizer, replica=replica, num_replicas=2, timeout_s=20.0,
            signals=(), memory_directory=root / "memory",
        ) as run:  # fmt: skip
            model(torch.ones(1, WIDTH)).sum().backward()
            run.reduce_gradients()
            return str(run.present)
    except RankMismatchError as error:
        return str(error)


@pytest.mark.nightly
def test_another_model_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    first, second = run_ranks(of_another_width, 2, tmp_path)
    assert first == "(0,)"
    assert "other shards than replica 0" in second


def test_numbers_out_of_range(tmp_path: Path) -> None:
    model, optimizer = make(0)
    for options in ({"replica": 2}, {"timeout_s": 0.0}, {"stall_s": 1.0}):
        given: dict[str, Any] = {"replica": 0, "num_replicas": 2, **options}
        with (
            pytest.raises(ValueError, match="expected"),
            elastic.replicas(tmp_path / "run", model, optimizer, **given),
        ):
            raise AssertionError("it must not be entered")


def told_to_end(root: Path) -> int:
    """The other replica never comes; after a moment this process gets a signal."""
    model, optimizer = make_sharded(0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with elastic.replicas(
            root / "run", model, optimizer, replica=0, num_replicas=2,
            memory_directory=root / "memory",
        ):  # fmt: skip
            raise AssertionError("it must not be entered")
    except SystemExit as error:
        return int(error.code or 0)


def test_a_process_that_waits_for_others_ends_when_it_is_told_to(tmp_path: Path) -> None:
    assert run_ranks(told_to_end, 1, tmp_path) == [143]


def told_in_a_step(root: Path) -> list[bool]:
    """Whether the replica has said that it has ended, when it saves after a signal."""
    model, optimizer = make_sharded(0)
    has_left, save = list[bool](), checkpoint.save
    with (
        contextlib.suppress(SystemExit),
        elastic.replicas(
            root / "run", model, optimizer, replica=0, num_replicas=1, every_on_disk=None,
            memory_directory=root / "memory",
        ) as run,
    ):  # fmt: skip

        def observed(*args: Any, **options: Any) -> None:
            has_left.append(run._board.has_left(run.member))
            save(*args, **options)

        with mock.patch.object(checkpoint, "save", observed):
            for _ in run.steps(until=3):
                model(torch.ones(1, WIDTH)).sum().backward()
                run.reduce_gradients()
                optimizer.step()
                os.kill(os.getpid(), signal.SIGTERM)
    return has_left


def test_the_others_do_not_wait_until_a_stopped_replica_has_saved(tmp_path: Path) -> None:
    assert run_ranks(told_in_a_step, 1, tmp_path) == [[True]]


def own_data(root: Path) -> tuple[str, list[float]]:
    """Replica r has gradients of r + 1 and 10 (r + 1), the second one on replica 1 only."""
    replica = split(root, 1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with elastic.replicas(
        root / "run", model, optimizer, replica=replica, num_replicas=2, signals=(),
        memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for number in run.steps(until=2):
            if number == 1:
                run._exchange.step -= 1
                with pytest.raises(RuntimeError, match="averaged over the replicas already"):
                    run.reduce_gradients()
                run._exchange.step += 1
            model[0].grad = torch.full((2,), replica + 1.0)
            if replica == 1:
                model[1].grad = torch.full((2,), 20.0)
            run.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
        assert model[2].grad is None
    return run.source, [float(param[0].detach()) for param in model]


def test_own_data(tmp_path: Path) -> None:
    results = run_ranks(own_data, 2, tmp_path)
    assert results == [("start", [-3.0, -20.0, 0.0]), ("replica", [-3.0, -20.0, 0.0])]


def forgets(root: Path) -> str:
    model, optimizer = make_sharded(0)
    try:
        with elastic.replicas(
            root / "run", model, optimizer, replica=0, num_replicas=1, signals=(),
            memory_directory=root / "memory",
        ) as run:  # fmt: skip
            for _ in run.steps(until=2):
                pass
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_step_without_the_others_is_an_error(tmp_path: Path) -> None:
    (text,) = run_ranks(forgets, 1, tmp_path)
    assert "step 0 was made without the gradients of the other replicas" in text


WINDOW = 6


def accumulate(root: Path, replica: int, fault: Fault) -> list[tuple[int, float]]:
    """The steps of one optimizer's step are several of the loop's. Each adds 1 to the gradient."""
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with elastic.replicas(
        root / "run", model, optimizer, replica=replica, num_replicas=2, timeout_s=20.0,
        every=100, every_on_disk=None, signals=(), memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for number in run.steps(until=3 * WINDOW):
            fault(run, number)
            model(torch.ones(1, 2)).sum().backward()
            run.reduce_gradients()
            found.append((number, model.weight.grad.full_tensor()[0, 0].item()))  # type: ignore[union-attr]
            if (number + 1) % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad()
    return found


def returns_while_gradients_wait(root: Path) -> list[tuple[int, float]]:
    def leave(run: elastic.ReplicaRun, step: int) -> None:
        if step == 2:
            raise Stop

    def wait(run: elastic.ReplicaRun, step: int) -> None:
        if step == WINDOW + 1:
            alone.touch()
            while not run._pulse.is_wished:
                time.sleep(0.01)

    replica, alone = split(root, 1), root / "alone"
    if replica == 1:
        return accumulate(root, 1, wait)
    with pytest.raises(Stop):
        accumulate(root, 0, leave)
    while not alone.exists():
        time.sleep(0.01)
    return accumulate(root, 0, lambda *_: None)


def test_a_replica_joins_when_no_gradients_wait(tmp_path: Path) -> None:
    returned, stayed = run_ranks(returns_while_gradients_wait, 2, tmp_path)
    expected = [(number, number % WINDOW + 1.0) for number in range(3 * WINDOW)]
    assert stayed == expected
    assert returned == expected[2 * WINDOW :]
