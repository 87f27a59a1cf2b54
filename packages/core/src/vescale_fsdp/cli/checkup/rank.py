"""One of the self-test's processes: does one step after another, and reports each.

Started by `selftest`. The only file here that imports torch, and it does so inside of its steps:
an import that fails, or never returns, is the step's result. Each step appends a line of JSON to
the rank's report::

    {"step": "all-gather", "seconds": 0.01, "value": null}
    {"step": "all-to-all", "error": "RuntimeError: ..."}
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 16 << 20  # that each rank sends to the other when the bandwidth is measured
_NUM_MESSAGES = 5
_CONNECT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Place:
    """Which process this is, and where it finds the others."""

    rank: int
    world_size: int
    folder: Path  # shared by the ranks; empty at first

    @property
    def report(self) -> Path:
        return self.folder / f"report-{self.rank}.jsonl"


def main(rank: int, world_size: int, folder: str, steps: list[str]) -> None:
    """Do these steps, until one fails, and exit. The report says how it went, not the exit code."""
    threading.Thread(target=_exit_without_parent, daemon=True).start()
    place = Place(rank, world_size, Path(folder))
    with place.report.open("a") as report:
        for name in steps:
            begin = time.perf_counter()
            line: dict[str, Any] = {"step": name}
            try:
                line["value"] = STEPS[name](place)
                line["seconds"] = round(time.perf_counter() - begin, 3)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
                traceback.print_exc()
                line["error"] = f"{type(error).__name__}: {error}"
            report.write(json.dumps(line) + "\n")
            report.flush()
            if "error" in line:
                break
    os._exit(0)  # gloo now and then aborts in the interpreter's exit handlers (torch 2.13)


def _exit_without_parent() -> None:
    """The parent holds the other end of stdin, and never writes: the end of it is its death."""
    os.read(0, 1)
    os._exit(1)


# Steps of a look, by one process


def _import_torch(place: Place) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    has_distributed = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "debug": bool(torch.version.debug),
        "threads": torch.get_num_threads(),
        "distributed": has_distributed,
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if has_distributed and getattr(dist, f"is_{name}_available", lambda: False)()
        ],
    }


def _find_devices(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {"type": None, "devices": [], "complaint": ""}
    if place.rank:  # one is enough: a look takes some memory on each device
        return found
    from vescale_fsdp import devices

    with warnings.catch_warnings(record=True) as caught:  # why torch sees none, among others
        warnings.simplefilter("always")
        found |= devices.describe_all()
    found["complaint"] = "; ".join(str(each.message) for each in caught)
    return found


# Steps of the self-test, by two


def _import_ours(place: Place) -> None:
    import torch

    import vescale_fsdp.engine  # noqa: F401

    torch.set_num_threads(1)  # the ranks share the CPUs, and the tensors are small
    torch.manual_seed(0)


def _connect(place: Place) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder / 'rendezvous'}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
    )


def _all_gather(place: Place) -> None:
    import torch

    # Rank r gives 10 r, 10 r + 1, 10 r + 2.
    mine = torch.arange(3.0) + 10 * place.rank
    everything = torch.empty(3 * place.world_size)
    _gather(everything, mine)
    _expect(everything.tolist(), [0.0, 1.0, 2.0, 10.0, 11.0, 12.0])


def _all_to_all(place: Place) -> None:
    import torch

    # Rank r gives 10 r + d to rank d, twice.
    mine = torch.tensor([0.0, 0.0, 1.0, 1.0]) + 10 * place.rank
    received = torch.empty(4)
    _exchange(received, mine)
    _expect(received.tolist(), [0.0 + place.rank] * 2 + [10.0 + place.rank] * 2)


def _bandwidth(place: Place) -> dict[str, float]:
    """Megabytes (10**6) per second that each rank receives from the other, while it sends too."""
    import torch

    elements = MESSAGE_BYTES // 4
    mine, both, other = torch.ones(elements), torch.ones(2 * elements), torch.ones(2 * elements)
    return {
        "all_gather_mb_per_s": _speed(lambda: _gather(both, mine)),
        "all_to_all_mb_per_s": _speed(lambda: _exchange(both, other)),
    }


def _speed(send: Callable[[], None]) -> float:
    import torch.distributed as dist

    times = []
    for _ in range(1 + _NUM_MESSAGES):
        dist.barrier()
        begin = time.perf_counter()
        send()
        times.append(time.perf_counter() - begin)
    return round(MESSAGE_BYTES / 1e6 / statistics.median(times[1:]), 1)


def _train(place: Place) -> None:
    """Two steps of SGD on shards, against the same on one process with both ranks' data."""
    import torch

    plain, sharded = _make_model(), _make_sharded_model()
    # Not Adam, whose steps are the same if all gradients are wrong by a factor.
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)
    ]
    for step in range(2):
        batches = [torch.linspace(-1, 1, 14).view(2, 7) + rank + step for rank in (0, 1)]
        sharded(batches[place.rank]).square().mean().backward()
        torch.stack([plain(batch).square().mean() for batch in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        difference = float((_whole(found) - expected).detach().abs().max())
        if not difference < 1e-4:  # the steps move by more than 0.01
            raise AssertionError(f"{name} is off by {difference:g} after two steps")


def _checkpoint(place: Place) -> None:
    """Write a sharded model and read it into another one."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    saved, loaded = _make_sharded_model(), _make_sharded_model()
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    folder = place.folder / "checkpoint"
    save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    load(state, checkpoint_id=folder)
    for (name, expected), found in zip(saved.named_parameters(), loaded.parameters(), strict=True):
        if not torch.equal(_whole(found), _whole(expected)):
            raise AssertionError(f"{name} is not what was saved")


def _disconnect(place: Place) -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _make_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _make_sharded_model() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from vescale_fsdp.engine import fully_shard

    model, mesh = _make_model(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(param: Any) -> Any:
    return param.full_tensor()


def _gather(output: Any, input_: Any) -> None:
    import torch.distributed as dist

    from vescale_fsdp import compat

    assert dist.group.WORLD is not None, "connected"
    compat.all_gather_single(output, input_, dist.group.WORLD).wait()


def _exchange(output: Any, input_: Any) -> None:
    import torch.distributed as dist

    from vescale_fsdp import compat

    assert dist.group.WORLD is not None, "connected"
    compat.all_to_all_single(output, input_, dist.group.WORLD).wait()


def _expect(found: list[float], expected: list[float]) -> None:
    if found != expected:
        raise AssertionError(f"received {found} instead of {expected}")


# What one process does to look at torch and the devices.
LOOKS = ["import torch", "devices"]
STEPS: dict[str, Callable[[Place], Any]] = {
    "import torch": _import_torch,
    "devices": _find_devices,
    "import vescale_fsdp": _import_ours,
    "connect": _connect,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "bandwidth": _bandwidth,
    "training step": _train,
    "checkpoint": _checkpoint,
    "disconnect": _disconnect,
}
LAST = "disconnect"
