"""``fsdp_vescale_optimizer``: the bits of the same optimizer made by hand, also after a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, OptimizerGroup, Shampoo, split_named_params
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin

from .helpers import accelerator, full, loss_of, make_loader, make_model

ARGUMENTS: dict[str, dict[str, Any]] = {
    "muon": {"momentum": 0.9},
    "shampoo": {"block_size": 4},
    "soap": {"precondition_frequency": 2},
    "adamw8bit": {"block_size": 8, "min_8bit_size": 8},
}
STEPS = 4
Run = tuple[dict[str, torch.Tensor], list[float], list[float]]


def by_hand(name: str, model: Any) -> Any:
    args, common = ARGUMENTS[name], {"lr": 1e-2, "weight_decay": 0.1}
    if name == "adamw8bit":
        return AdamW8bit(model.named_parameters(), **common, **args)
    hidden, rest = split_named_params(model)
    makers: dict[str, Any] = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP}
    also = {"adjust_lr_fn": "match_rms_adamw"} if name == "muon" else {}
    matrices = makers[name](hidden, **common, **also, **args)
    return OptimizerGroup({name: matrices, "adamw": torch.optim.AdamW(rest, **common)})


def train(name: str, plugin: VeScaleFSDPPlugin, folder: Path | None, resumes: bool) -> Run:
    """Train for `STEPS` steps, or resume after half of them."""
    with accelerator(fsdp_plugin=plugin) as acc:
        model: Any = make_model(seed=5 if resumes else 0)
        optimizer: Any = by_hand(name, model) if plugin.optimizer is None else None
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
        if resumes:
            acc.load_state(folder)
        (tokens,) = next(iter(make_loader(1)))
        losses, rates = [], []
        for step in range(STEPS // 2 if resumes else 0, STEPS):
            if step == STEPS // 2 and folder is not None and not resumes:
                acc.save_state(folder)
            loss = loss_of(model, tokens)
            acc.backward(loss)
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return {key: full(p) for key, p in model.named_parameters()}, losses, rates


def train_all(root: Path) -> dict[str, tuple[Run, Run, Run]]:
    found = {}
    for name, args in ARGUMENTS.items():
        plugin = {"optimizer": name, "optimizer_args": args, "sealed": name in ("soap", "muon")}
        found[name] = (
            train(name, VeScaleFSDPPlugin(**plugin), root / name, False),
            train(name, VeScaleFSDPPlugin(**plugin), root / name, True),
            train(name, VeScaleFSDPPlugin(), None, False),
        )
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run, Run]]:
    return run_ranks(train_all, 2, tmp_path_factory.mktemp("optimizers"))[0]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_by_name_it_has_the_bits_of_one_made_by_hand(
    runs: dict[str, tuple[Run, Run, Run]], name: str
) -> None:
    (found, losses, rates), (resumed, half, _), (expected, expected_losses, also) = runs[name]
    assert losses == expected_losses
    assert losses[-1] < losses[0]
    assert half == losses[STEPS // 2 :]
    assert rates == also
    assert rates[2] < rates[1] < rates[0]
    for key, param in expected.items():
        assert torch.equal(found[key], param), key
        assert torch.equal(resumed[key], param), key


def resume_from_whole_states() -> None:
    """Two steps in one process, the second also on shards, with the states of the first."""
    with accelerator() as acc:
        plain = make_model()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        (tokens,) = next(iter(make_loader(1)))
        for step in range(2):
            if step == 1:
                states = copy.deepcopy(reference.state_dict())
                model: Any = copy.deepcopy(plain)
            loss_of(plain, tokens).backward()
            reference.step()
            reference.zero_grad()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        optimizer.load_state_dict(states)
        acc.backward(loss_of(model, tokens))
        optimizer.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine), theirs)


def test_each_rank_takes_its_part_of_whole_states() -> None:
    run_ranks(resume_from_whole_states, 2)


class Adam8bit(torch.optim.AdamW):
    """As of bitsandbytes, which need not be there."""

    __module__ = "bitsandbytes.optim.adamw"


class APOLLOAdamW(torch.optim.AdamW):
    """As ``optim="apollo_adamw"`` of TrainingArguments makes it; the package need not be there."""

    __module__ = "apollo_torch.apollo"


class GaLoreAdafactor(torch.optim.SGD):
    __module__ = "galore_torch.adafactor"


class AdaLomo(torch.optim.SGD):
    __module__ = "lomo_optim.adalomo"


def prepare_others() -> dict[str, str]:
    transformers = pytest.importorskip("transformers")
    made: dict[str, Any] = {
        "bitsandbytes": Adam8bit,
        "adafactor": transformers.Adafactor,
        "apollo": APOLLOAdamW,
        "galore": GaLoreAdafactor,
        "lomo": AdaLomo,
    }
    messages = {}
    for name, cls in made.items():
        with accelerator() as acc:
            model = make_model()
            with pytest.raises(ValueError, match="does not step on sharded parameters") as error:
                acc.prepare(model, cls(model.parameters(), lr=None if name == "adafactor" else 0.1))
            messages[name] = str(error.value)
    return messages


def test_what_needs_whole_tensors_is_refused_and_names_ours() -> None:
    messages = run_ranks(prepare_others, 2)[0]
    assert "got Adam8bit of bitsandbytes, which" in messages["bitsandbytes"]
    assert "got Adafactor of transformers, which" in messages["adafactor"]
    assert "got APOLLOAdamW of apollo_torch, which" in messages["apollo"]
    assert "got GaLoreAdafactor of galore_torch, which" in messages["galore"]
    assert "got AdaLomo of lomo_optim, which" in messages["lomo"]
    for message in messages.values():
        assert "Set fsdp_vescale_optimizer: adamw8bit in the yaml" in message
        assert "or make a vescale_fsdp.optim.AdamW8bit" in message


def adafactor(*, is_sharded: bool) -> dict[str, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(sharding="ddp")) as acc:
        model: Any = make_model()
        optimizer = transformers.Adafactor(model.parameters())
        if is_sharded:
            model, optimizer = acc.prepare(model, optimizer)
        for (tokens,) in make_loader(2):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: full(param) for name, param in model.named_parameters()}


def adafactors() -> list[dict[str, torch.Tensor]]:
    return [adafactor(is_sharded=True), adafactor(is_sharded=False)]


def test_adafactor_runs_on_replicated_parameters() -> None:
    for ours, one in run_ranks(adafactors, 2):
        for key, value in one.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)


def replace_others() -> list[bool]:
    transformers = pytest.importorskip("transformers")
    found = []
    adafactor = {"scale_parameter": False, "relative_step": False}
    for cls, options in ((Adam8bit, {}), (transformers.Adafactor, adafactor)):
        with accelerator(fsdp_plugin=VeScaleFSDPPlugin(optimizer="adamw8bit")) as acc:
            model = make_model()
            model, optimizer = acc.prepare(model, cls(model.parameters(), lr=1e-2, **options))
            (tokens,) = next(iter(make_loader(1)))
            losses = []
            for _ in range(3):
                loss = loss_of(model, tokens)
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append(losses[2] < losses[1] < losses[0])
    return found


def test_ours_steps_in_their_place() -> None:
    assert run_ranks(replace_others, 2) == [[True, True]] * 2
