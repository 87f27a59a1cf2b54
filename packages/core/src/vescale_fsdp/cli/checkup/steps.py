"""The self-test: two ranks on gloo connect and train for two steps. This module imports torch."""

from __future__ import annotations

import io
import os
import socket
import tempfile
import time
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp.cli.checkup import Section
from vescale_fsdp.engine import fully_shard
from vescale_fsdp.testing import RankError, run_ranks

_CONNECT_TIMEOUT_S = 15.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACKS = ("lo", "lo0")  # Linux, macOS


def look_at_self_test(section: Section, limit_s: float) -> None:
    """Let two ranks connect and train, and add what they did, or why they could not.

    The first try is over the interface that the environment names, or gloo's own choice. Ranks that
    cannot connect over it try the loopback.

    Args:
        limit_s: for each step. Ranks that take longer are killed.
    """
    wanted, step = os.environ.get(_INTERFACE, ""), "connect"
    try:
        with (
            tempfile.TemporaryDirectory(
                prefix="vescale-fsdp-doctor-", ignore_cleanup_errors=True
            ) as folder,
            mock.patch.dict(os.environ),
            redirect_stderr(io.StringIO()),  # hide the output of the ranks
        ):
            os.environ.pop(_INTERFACE, None)  # without it, ranks of run_ranks use the loopback
            begin = time.monotonic()
            try:
                run_ranks(connect, 2, folder, wanted, timeout_s=limit_s)
                if wanted:
                    os.environ[_INTERFACE] = wanted
            except RankError:
                run_ranks(dist.barrier, 2, timeout_s=limit_s)
                _add_loopback(section, wanted)
            _add(section, step, "done", begin)
            step, begin = "training step", time.monotonic()
            run_ranks(train, 2, timeout_s=limit_s)
            _add(section, step, "same weights as one process", begin)
    except RankError as error:
        words = " ".join(f"rank {error.rank}: {error.type_name}: {error.message}".split())
        section.add(step, "FAILED", {"ok": False})
        change = (
            "name the network interface: export GLOO_SOCKET_IFNAME=..., see: ip address"
            if step == "connect"
            else "fix the other findings first; if that does not help, report it with the output "
            "of: vescale-fsdp doctor --json"
        )
        section.broken(f"{step}: {words}", change)
    except OSError as error:
        section.add(step, "FAILED", {"ok": False})
        section.broken(
            f"start: {type(error).__name__}: {error}",
            "check that the temporary folder is writable; TMPDIR=... names another",
        )


def _add(section: Section, step: str, done: str, begin: float) -> None:
    seconds = round(time.monotonic() - begin, 2)
    section.add(step, f"{done}, {seconds:.2f} s", {"ok": True, "seconds": seconds})


def _add_loopback(section: Section, wanted: str) -> None:
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACKS]
    if loopback and wanted not in loopback:  # else the first try was only slow
        section.broken(
            "two processes on this machine find each other only over the loopback",
            f"export GLOO_SOCKET_IFNAME={loopback[0]}; for several machines, the one they share",
        )


def connect(folder: str, interface: str) -> None:
    """Connect the ranks again, over this interface; "" is gloo's choice."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop(_INTERFACE, None)
    if interface:
        os.environ[_INTERFACE] = interface
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
    )
    dist.barrier()


def train() -> None:
    """Compare two steps of SGD on a sharded model with one process that has both ranks' data."""
    plain, sharded = make_model(), shard(make_model())
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


def make_model() -> nn.Sequential:
    """The model of the self-test, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def shard(model: nn.Sequential) -> Any:
    """Shard it over the two ranks, as two units."""
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)
