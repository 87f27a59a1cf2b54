"""Which backend moves a tensor, however ``init_process_group`` was called."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from vescale_fsdp import fully_shard
from vescale_fsdp.backends import (
    backend_name,
    backends_of,
    collective_device,
    is_fake,
    nccl_devices,
    spelling_of,
)
from vescale_fsdp.dbuffer import collectives as of_buffers
from vescale_fsdp.dbuffer import transport
from vescale_fsdp.engine.axes import comm_for
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

PACKAGES = Path(__file__).parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def names_after(backend: str | None) -> tuple[str, str, str]:
    """What torch says, and what we say of the CPU and of CUDA, on a rank of its own."""
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert is_fake() == (backend is not None and "fake" in backend)
    return str(dist.get_backend()), backend_name(None, CPU), backend_name(dist.group.WORLD, CUDA)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", ("gloo", "gloo", "gloo")),  # it takes CUDA's, too
        ("GLOO", ("gloo", "gloo", "gloo")),
        (None, ("undefined", "gloo", "")),  # of the devices that are there
        ("cpu:gloo", ("cpu:gloo", "gloo", "")),
        ("cpu:gloo,cuda:fake", ("cpu:gloo,cuda:fake", "gloo", "fake")),
        ("CPU:GLOO", ("cpu:gloo", "gloo", "")),
        ("fake", ("fake", "fake", "fake")),
    ],
)
def test_a_backend_is_known_by_its_device(
    backend: str | None, expected: tuple[str, str, str]
) -> None:
    assert run_ranks(names_after, 1, backend) == [expected]


class Group:
    """As of NCCL, of both, ...: what torch's groups of these backends do."""

    def __init__(self, **names: str) -> None:
        self._names = names
        self._device_types = [torch.device(kind) for kind in names]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._names:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: self._names[device.type])


def test_nccl_alone_has_nothing_for_the_cpu() -> None:
    group: Any = Group(cuda="NCCL")
    assert backend_name(group, CUDA) == "nccl"
    assert backend_name(group, "cpu") == ""
    assert backends_of(group) == {"cuda": "nccl"}
    assert spelling_of(group) == "cuda:nccl"
    cuda = SimpleNamespace(current_device=lambda: 3, is_available=lambda: True)
    with mock.patch.object(torch, "get_device_module", return_value=cuda):
        assert collective_device(group, CPU) == torch.device("cuda", 3)
    assert collective_device(group, CUDA) == CUDA


@pytest.mark.parametrize("name", ["nccl2", "nccl-lazy", "nccl-legacy"])
def test_each_implementation_of_nccl_is_nccl(name: str) -> None:
    group: Any = Group(cuda=name)
    assert backend_name(group, CUDA) == "nccl"
    assert spelling_of(group) == "cuda:nccl"
    assert nccl_devices(group) == ["cuda"]


def test_gloo_that_was_asked_for_the_cpu_alone_takes_nothing_of_cuda() -> None:
    group: Any = Group(cpu="gloo")
    assert collective_device(group, CUDA) == CPU


def test_with_a_backend_for_each_a_tensor_stays_where_it_is() -> None:
    group: Any = Group(cpu="gloo", cuda="nccl")
    assert backends_of(group) == {"cpu": "gloo", "cuda": "nccl"}
    assert collective_device(group, CPU) == CPU
    assert collective_device(group, CUDA) == CUDA


def test_a_group_that_is_made_by_hand_takes_every_device() -> None:
    threads, alone = ProcessLocalGroup(0, 2), dist.ProcessGroup(dist.HashStore(), 0, 1)
    bare: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert [backend_name(bare, device) for device in (CPU, CUDA)] == ["gloo", "gloo"]
    assert [backend_name(threads, device) for device in (CPU, CUDA)] == ["threaded", "threaded"]
    assert backend_name(alone, CPU) == ""
    assert collective_device(bare, CPU) == collective_device(threads, CPU) == CPU


def check_new_groups() -> list[str]:
    gloo = dist.new_group(backend="cpu:gloo")
    groups = [collectives.new_group([0, 1]), collectives.new_group([0, 1], gloo)]
    assert collectives.group_over([0, 1], groups[0]) is dist.group.WORLD
    assert collectives.group_over([0, 1], gloo) is collectives.group_over([0, 1], groups[1])
    assert collectives.group_over([0, 1], gloo) is not dist.group.WORLD
    return [spelling_of(group) for group in groups]


def test_a_new_group_has_the_backends_of_another() -> None:
    assert run_ranks(check_new_groups, 2) == [["gloo", "cpu:gloo"]] * 2


# --- a job that names no backend ------------------------------------------------------------------


def check_default_call() -> None:
    """On CPUs: reductions and exchanges of ours, and the numbers of one process."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()  # else a rank leaves while the other still connects to it
    dist.destroy_process_group()
    dist.init_process_group(
        store=dist.PrefixStore("again", store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    assert dist.get_backend() == "undefined"
    torch.manual_seed(0)
    plain, model = nn.Linear(64, 128), nn.Linear(64, 128)
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    batch = torch.randn(8, 64)
    made = mock.patch.object(of_buffers, "Exchange", wraps=transport.Exchange)
    with made as exchanges:
        model(batch[4 * rank : 4 * rank + 4]).square().mean().backward()
    assert exchanges.call_count == 2  # a gather and a reduction, of 16 KiB a part
    plain(batch).square().mean().backward()
    (unit,) = units_in(model).values()
    (group,) = unit.groups
    assert comm_for(group.axes).reduction == "all_to_all"
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


def test_without_a_backend_gloo_is_found_and_used_as_gloo() -> None:
    run_ranks(check_default_call, 2)


# --- nobody asks in another way -------------------------------------------------------------------


def test_nothing_asks_torch_for_the_name_that_a_group_was_made_with() -> None:
    """What ``dist.get_backend`` returns is the spelling of a call, and not a backend's name."""
    asks = re.compile(r"\b(get_backend|_get_backend|get_backend_config)\b")
    files = [path for path in PACKAGES.glob("*/src/**/*.py") if path.name != "backends.py"]
    assert len(files) > 100
    assert [str(path) for path in files if asks.search(path.read_text())] == []
