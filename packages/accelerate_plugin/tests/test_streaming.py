"""Whole parameters of a prepared model, as a stream."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fsdp import stream_parameters
from vescale_fsdp.testing import run_ranks

from .helpers import accelerator, full, loss_of, make_model

TOKENS = torch.arange(10).view(2, 5)


def check() -> None:
    with accelerator() as acc:
        model: Any = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        names = [name for name, _ in model.named_parameters()]
        model, optimizer = acc.prepare(model, optimizer)
        for _ in range(2):
            acc.backward(loss_of(model, TOKENS))
            optimizer.step()
            optimizer.zero_grad()
            found = dict(stream_parameters(model))
            assert list(found) == names
            for name, param in model.named_parameters():
                assert torch.equal(found[name], full(param))
            mine = dict(stream_parameters(model, to=0))
            assert all((tensor is not None) == acc.is_main_process for tensor in mine.values())


def test_a_prepared_model_streams_under_the_names_of_the_plain_one() -> None:
    run_ranks(check, 2)
