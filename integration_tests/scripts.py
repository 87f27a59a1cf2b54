"""Runs a script on ranks as torchrun would, without a fresh interpreter for each of them.

A rank that torchrun starts needs four seconds of a core before its first step, to load torch. Those
of `run_ranks` have it loaded. That the launcher itself works, some scripts show that use it.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from vescale_fsdp.testing import run_ranks


def run_script(script: Path, *arguments: str, processes: int = 2, cwd: Path) -> str:
    """What the script prints on so many processes, which work in the directory `cwd`."""
    # As the agent of torchrun it is here, so that no other process takes its port meanwhile.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with contextlib.redirect_stderr(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("default")  # ranks have the filters of the caller
        run_ranks(_run, processes, script, arguments, cwd, store.port, timeout_s=280)
    return output.getvalue()


def _run(script: Path, arguments: tuple[str, ...], cwd: Path, port: int) -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the script makes its own
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "COLUMNS": "120"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.chdir(cwd)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
