"""The steps of the self test: two ranks on gloo. This module imports torch.

Each step is a function that both ranks call with an empty folder that they share. If it raises, the
error becomes a finding. `vescale_fsdp.testing` starts the ranks.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp.cli.checkup.devices import LIMIT_S, START, Outcome
from vescale_fsdp.engine import fully_shard
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import RankError, run_ranks

MESSAGE_BYTES = 16 << 20  # that each rank sends to measure the bandwidth
_NUM_MESSAGES = 5
_CONNECT_TIMEOUT_S = 15.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


def run_steps(outcome: Outcome, limit_s: float = LIMIT_S) -> bool:
    """Run the steps on two ranks until one fails, and add the results to ``outcome``.

    If the ranks cannot connect over the interface of the environment, they use the loopback.

    Args:
        limit_s: for each step. Ranks that take longer are killed.

    Returns:
        Whether the ranks could connect only over the loopback.
    """
    begin, wanted, only_over_loopback = time.monotonic(), os.environ.get(_INTERFACE, ""), False
    try:
        with (
            tempfile.TemporaryDirectory(
                prefix="vescale-fsdp-doctor-", ignore_cleanup_errors=True
            ) as folder,
            mock.patch.dict(os.environ),
            redirect_stderr(io.StringIO()),  # hide the output of the ranks
        ):
            os.environ.pop(_INTERFACE, None)  # without it, ranks of run_ranks use the loopback
            try:
                _run("connect", outcome, limit_s, folder, wanted)
                if wanted:
                    os.environ[_INTERFACE] = wanted
            except RankError:
                _run("connect", outcome, limit_s, folder, None)
                only_over_loopback = True
            for step in STEPS:
                _run(step, outcome, limit_s, folder, None)
    except RankError as error:
        words = f"rank {error.rank}: {error.type_name}: {error.message}"
        outcome.error = " ".join(words.split())
    except OSError as error:
        outcome.failed, outcome.error = START, f"{type(error).__name__}: {error}"
    outcome.total_s += time.monotonic() - begin
    return only_over_loopback


def _run(step: str, outcome: Outcome, limit_s: float, folder: str, wanted: str | None) -> None:
    outcome.failed = step
    results = run_ranks(_timed, 2, step, folder, wanted, timeout_s=limit_s)
    outcome.failed = None
    outcome.values[step] = results[0][0]
    outcome.seconds[step] = max(seconds for _, seconds in results)


def _timed(step: str, folder: str, wanted: str | None) -> tuple[Any, float]:
    """Run a step. Returns its result and its time on this rank, in seconds."""
    begin = time.perf_counter()
    value: Any = None
    if step in STEPS:
        value = STEPS[step](Path(folder))
    else:
        connect(Path(folder), wanted)
    return value, round(time.perf_counter() - begin, 3)


def connect(folder: Path, wanted: str | None) -> None:
    """Connect the ranks.

    Args:
        wanted: the network interface; "" for gloo's choice. None: keep the current process group.
    """
    if wanted is not None:
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ.pop(_INTERFACE, None)
        if wanted:
            os.environ[_INTERFACE] = wanted
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
        )
    dist.barrier()


def _all_gather(_: Path) -> None:
    # Rank r has 10 r, 10 r + 1, 10 r + 2.
    mine = torch.arange(3.0) + 10 * dist.get_rank()
    everything = torch.empty(6)
    _gather(everything, mine)
    _expect(everything.tolist(), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0])


def _all_to_all(_: Path) -> None:
    # Rank r sends 10 r + d to rank d, twice.
    mine = torch.tensor([0.0, 0.0, 1.0, 1.0]) + 10 * dist.get_rank()
    received = torch.empty(4)
    _exchange(received, mine)
    _expect(received.tolist(), [0.0 + dist.get_rank()] * 2 + [10.0 + dist.get_rank()] * 2)


def _bandwidth(_: Path) -> dict[str, float]:
    """Measure the MB/s (10**6 bytes) that each rank receives from the other while it also sends."""
    elements = MESSAGE_BYTES // 4
    mine, both, other = torch.ones(elements), torch.ones(2 * elements), torch.ones(2 * elements)
    return {
        "all_gather_mb_per_s": _speed(lambda: _gather(both, mine)),
        "all_to_all_mb_per_s": _speed(lambda: _exchange(both, other)),
        "message_bytes": MESSAGE_BYTES,
    }


def _speed(send: Callable[[], None]) -> float:
    times = []
    for _ in range(1 + _NUM_MESSAGES):
        dist.barrier()
        begin = time.perf_counter()
        send()
        times.append(time.perf_counter() - begin)
    return round(MESSAGE_BYTES / 1e6 / statistics.median(times[1:]), 1)


def _train(_: Path) -> None:
    """Compare two steps of SGD on a sharded model with one process that has both ranks' data."""
    plain, sharded = _make_model(), _make_sharded_model()
    # Not Adam: its steps do not change if all gradients have a wrong factor.
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)
    ]
    for step in range(2):
        batches = [torch.linspace(-1, 1, 14).view(2, 7) + rank + step for rank in (0, 1)]
        sharded(batches[dist.get_rank()]).square().mean().backward()
        torch.stack([plain(batch).square().mean() for batch in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        difference = float((found.full_tensor() - expected).detach().abs().max())
        if not difference < 1e-4:  # a step changes parameters by more than 0.01
            raise AssertionError(f"{name} is off by {difference:g} after two steps")


def _checkpoint(folder: Path) -> None:
    """Save a sharded model, and load it into another one."""
    saved, loaded = _make_sharded_model(), _make_sharded_model()
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    state_dict_saver.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder)
    for (name, expected), found in zip(saved.named_parameters(), loaded.parameters(), strict=True):
        if not torch.equal(found.full_tensor(), expected.full_tensor()):
            raise AssertionError(f"{name} differs from the saved value")


def _make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _make_sharded_model() -> Any:
    model, mesh = _make_model(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _gather(output: Any, input_: Any) -> None:
    assert dist.group.WORLD is not None, "connected"
    collectives.all_gather_single(output, input_, dist.group.WORLD).wait()


def _exchange(output: Any, input_: Any) -> None:
    assert dist.group.WORLD is not None, "connected"
    collectives.all_to_all_single(output, input_, dist.group.WORLD).wait()


def _expect(found: list[float], expected: list[float]) -> None:
    if found != expected:
        raise AssertionError(f"received {found} instead of {expected}")


STEPS: dict[str, Callable[[Path], Any]] = {
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "bandwidth": _bandwidth,
    "training step": _train,
    "checkpoint": _checkpoint,
}
