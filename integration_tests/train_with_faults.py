"""``examples/train_gpt.py`` on a small text, with faults at certain steps: for `test_restarts`.

The environment variable FAULTS has lines ``attempt step rank action``: in that step, when it has
its gradients, that rank (or all) sends itself a signal, or with ``...-to-torchrun`` its parent.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import gpt
import train_gpt

VOCABULARY_SIZE = 300


def load_text() -> tuple[gpt.Vocabulary, gpt.Data, gpt.Data]:
    """100 windows of numbers that look random."""
    tokens = (torch.arange(6401) * 7919 % VOCABULARY_SIZE).to(torch.int16)
    windows = gpt.Windows(tokens, context=64)
    words = b" ".join(bytes([97 + i // 26, 97 + i % 26]) for i in range(VOCABULARY_SIZE - 256))
    vocabulary = gpt.Vocabulary(words, VOCABULARY_SIZE)
    return vocabulary, windows, torch.utils.data.Subset(windows, range(8))


class Faults:
    """Counts the steps, and acts in those that are named for this process."""

    def __init__(self, text: str) -> None:
        attempt, self.rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        lines = [line.split() for line in text.splitlines()]
        self.actions = {
            int(step): action
            for when, step, rank, action in lines
            if when == attempt and rank in (self.rank, "all")
        }
        self.step = 0
        self.batch_of, self.clip = train_gpt.batch_of, train_gpt.clip_grad_norm_

    def begin(self, step: int, data: gpt.Data, args: Namespace) -> list[torch.Tensor]:
        self.step = step + 1
        return self.batch_of(step, data, args)

    def act_and_clip(self, *arguments: Any) -> Any:
        action = self.actions.get(self.step)
        if action is not None:
            print(f"rank {self.rank} in step {self.step}: {action}", flush=True)
            name, to, _ = action.partition("-to-")
            os.kill(os.getppid() if to else os.getpid(), signal.Signals[name])
        return self.clip(*arguments)


if __name__ == "__main__":
    faults = Faults(os.environ["FAULTS"])
    train_gpt.load_text = load_text
    train_gpt.batch_of, train_gpt.clip_grad_norm_ = faults.begin, faults.act_and_clip
    train_gpt.main()
