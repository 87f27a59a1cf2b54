"""``fsdp_vescale_gather_codec`` and ``reduce_codec``: as with those of ``fully_shard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import (
    Granularity,
    QuantizedGather,
    QuantizedReduce,
    combine,
    fully_shard,
    repeated_blocks,
)
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.options import Options, from_config

from .helpers import Model, accelerator, full, loss_of, make_model

Run = tuple[list[float], dict[str, torch.Tensor]]
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gather_codec": {"block": [4, 4]}}, {"gather_codec": QuantizedGather("int8", block=(4, 4))}),
    (
        {"gather_codec": {"dtype": "e4m3", "block": 16}, "reduce_codec": {"block": 8}},
        {"gather_codec": QuantizedGather("e4m3", block=16), "reduce_codec": QuantizedReduce(8)},
    ),
    (
        {"reduce_codec": {"block": 8, "error_feedback": True}, "granularity": "rows:4"},
        {
            "reduce_codec": QuantizedReduce(8, error_feedback=True),
            "granularity": combine(Granularity.rows(4), QuantizedReduce(8).granularity()),
        },
    ),
]


def train(model: Model, optimizer: torch.optim.Optimizer) -> Run:
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(16, (4, 5), generator=generator)
    for _ in range(3):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full(p) for name, p in model.named_parameters()}


def by_plug_in(options: dict[str, Any]) -> Run:
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(**options)) as acc:
        model: Any = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return train(*acc.prepare(model, optimizer))


def by_hand(options: dict[str, Any]) -> Run:
    model = make_model()
    for block in repeated_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def run_all() -> list[tuple[Run, Run]]:
    return [(by_plug_in(ours), by_hand(theirs)) for ours, theirs in [*CASES, ({}, {})]]


def test_losses_and_parameters_are_those_of_fully_shard() -> None:
    *runs, (exact, _) = run_ranks(run_all, 2)[0]
    for (losses, params), (expected_losses, expected) in runs:
        assert losses == expected_losses
        assert losses[1:] != exact[0][1:]
        for name, param in expected.items():
            assert torch.equal(params[name], param), name


def resume(folder: Path) -> tuple[Run, Run]:
    """Sealed checkpoints keep what rounding took from the gradients."""
    runs = []
    for resumes in (False, True):
        plugin = VeScaleFSDPPlugin(reduce_codec={"block": 8, "error_feedback": True}, sealed=True)
        with accelerator(fsdp_plugin=plugin) as acc:
            model: Any = make_model(seed=int(resumes))
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = acc.prepare(model, optimizer)
            if resumes:
                acc.load_state(folder)
            else:
                train(model, optimizer)
                acc.save_state(folder)
            runs.append(train(model, optimizer))
    return runs[0], runs[1]


def test_error_feedback_goes_on_from_a_sealed_checkpoint(tmp_path: Path) -> None:
    for (losses, params), (expected_losses, expected) in run_ranks(resume, 2, tmp_path):
        assert losses == expected_losses
        for name, param in expected.items():
            assert torch.equal(params[name], param), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gather_codec", "int4"),
        ("gather_codec", True),
        ("gather_codec", {"dtype": "int4"}),
        ("gather_codec", {"blocks": 32}),
        ("gather_codec", {"block": [32, 32, 32]}),
        ("gather_codec", {"block": 0}),
        ("reduce_codec", "e4m3"),
        ("reduce_codec", {"error_feedback": "yes"}),
        ("reduce_codec", QuantizedGather()),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"fsdp_vescale_{key}: .* does not work.*; accepted: int8"):
        from_config({f"fsdp_vescale_{key}": value})


def test_words_mappings_and_objects_are_accepted() -> None:
    for value in ("int8", "e4m3", {"dtype": "e4m3", "block": [32, 32]}, QuantizedGather()):
        Options(gather_codec=value).check_options()
    for value in ("int8", {}, {"block": 256, "error_feedback": True}, QuantizedReduce()):
        Options(reduce_codec=value).check_options()


def test_former_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown key 'fsdp_vescale_gather'; did you mean fsdp_ves"
    ):
        from_config({"fsdp_vescale_gather": "int8"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'reduce'"):
        VeScaleFSDPPlugin(reduce="int8")  # type: ignore[call-arg]
