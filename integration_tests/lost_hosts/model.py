"""The small GPT that all trainings of this folder train, its data, and what they report.

It is in float64. The sums of 2 and of 4 ranks differ in their rounding, and a training makes such a
difference larger with each step. In float64 it stays below 1e-6 over the steps here, so that a
larger one shows a wrong sample, a wrong step or a wrong weight.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from benchmarks.namespaces import die_with_parent
from gpt import GPT

__all__ = [
    "GLOBAL_BATCH", "MICRO_BATCH", "Events", "Text", "again", "begin", "loss_of", "new_model",
]  # fmt: skip

CONTEXT, GLOBAL_BATCH, MICRO_BATCH = 64, 8, 2


def new_model() -> GPT:
    """A GPT over bytes, with 0.3 million parameters; always the same."""
    torch.manual_seed(0)
    return GPT(256, CONTEXT, layers=2, width=96, heads=4).double()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a byte, in float64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, the help pages of Python, as bytes: (context,) and the bytes after."""

    def __init__(self) -> None:
        from pydoc_data import topics

        text = "".join(topics.topics[key] for key in sorted(topics.topics)).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


class Events:
    """A file of this process with a line for each thing that happens, in JSON, with its time.

    Args:
        folder: of all processes.
        host: the name of this host.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._file = open(folder / f"{host}-{os.getpid()}-{time.time_ns()}.jsonl", "a")  # noqa: SIM115
        self._always = {"host": host, "rank": int(os.environ["RANK"])}

    def tell(self, what: str, at: float | None = None, **more: Any) -> None:
        line = {"at": time.time() if at is None else at, "what": what, **self._always, **more}
        # One write, so that a kill leaves a line whole or leaves none.
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def begin(root: Path) -> Events:
    """What each process does first. Returns its events."""
    began = process_start()
    die_with_parent()  # the ranks of an agent that is killed
    faulthandler.register(signal.SIGUSR1)  # the log then says where it hangs
    torch.set_num_threads(1)
    return again(root, began)


def again(root: Path, began: float | None = None) -> Events:
    """The events of a process that goes on after a loss: those of another attempt."""
    events = Events(root / "events", os.environ.get("HOST_NAME", "host"))
    events.tell("began", process_start() if began is None else began)
    return events


def process_start() -> float:
    """When this process began, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
