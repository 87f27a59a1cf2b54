"""Models without memory, compiled, in part left alone, in half precision."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn

from vescale_fsdp import FSDPModule, RaggedTensor
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin

from .helpers import accelerator, full, loss_of, make_model

TOKENS = torch.arange(10).view(2, 5)


def train(acc: Any, model: Any, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = acc.prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, TOKENS)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full(p) for name, p in model.named_parameters()}


def load_in_the_first_alone() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with accelerator() as acc:
        found["expected"] = train(acc, make_model())
    plugin = VeScaleFSDPPlugin(cpu_ram_efficient_loading=True, ignored_modules="blocks.1")
    with accelerator(fsdp_plugin=plugin) as acc:
        if acc.is_main_process:
            model = make_model()
        else:
            with init_empty_weights(include_buffers=True):
                model = make_model()
        model.shift.fill_(0.0)  # type: ignore[operator]
        found["trained"] = train(acc, model)
        found["buffer"] = model.shift.tolist()
        found["tied"] = model.head.weight is model.embed.weight
        found["ignored"] = type(model.blocks[1].weight).__name__
    try:
        VeScaleFSDPPlugin(cpu_ram_efficient_loading=True, sync_init=False)
        with accelerator(
            fsdp_plugin=VeScaleFSDPPlugin(cpu_ram_efficient_loading=True, sync_init=False)
        ):
            pass
    except ValueError as error:
        found["refused"] = str(error)
    return found


def test_the_first_process_alone_may_have_values() -> None:
    for found in run_ranks(load_in_the_first_alone, 2):
        losses, params = found["trained"]
        expected_losses, expected = found["expected"]
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, rtol=0, atol=1e-5, msg=name)
        assert found["buffer"] == [0.0] * 8
        assert found["tied"]
        assert found["ignored"] == "Parameter"
        assert "fsdp_vescale_sync_init: false has every process keep" in found["refused"]


def load_into_nothing(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with accelerator() as acc:
        model: Any = acc.prepare(make_model())
        acc.save_state(folder)
        found["expected"] = loss_of(model, TOKENS).item()
    with accelerator() as acc:
        with init_empty_weights():
            model = make_model(1)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = acc.prepare(model, optimizer)
        try:
            model(TOKENS)
        except RuntimeError as error:
            found["message"] = str(error)
        model.to_empty(device="cpu")
        acc._optimizers.clear()  # it was not saved
        acc.load_state(folder)
        loss = loss_of(model, TOKENS)
        found["loaded"] = loss.item()
        before = full(model.scale)
        acc.backward(loss)
        optimizer.step()
        found["trains"] = not torch.equal(before, full(model.scale))
    return found


def test_a_model_without_memory_takes_what_is_loaded(tmp_path: Path) -> None:
    for found in run_ranks(load_into_nothing, 2, tmp_path):
        assert "parameters should be materialized from meta device" in found["message"]
        assert found["loaded"] == found["expected"]
        assert found["trains"]


def compile_and_train() -> list[tuple[list[float], Any, int]]:
    found = []
    warnings.filterwarnings("ignore", "The .grad attribute")  # Dynamo looks at it
    for backend in ("no", "eager"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with accelerator(dynamo_backend=backend) as acc:
            losses, params = train(acc, make_model())
            found.append((losses, params, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


def test_compiled_units_train_as_others() -> None:
    (expected_losses, expected, none), (losses, params, graphs) = run_ranks(compile_and_train, 2)[0]
    assert none == 0
    assert graphs > 0
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, param in expected.items():
        torch.testing.assert_close(params[name], param, rtol=0, atol=1e-6, msg=name)


def leave_alone() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for wanted in ("list", "pattern"):
        model: Any = make_model(dist.get_rank())
        before = model.blocks[1].weight.detach().clone()
        ignored = [model.blocks[1]] if wanted == "list" else r"blocks\.1"
        with accelerator(fsdp_plugin=VeScaleFSDPPlugin(ignored_modules=ignored)) as acc:
            model = acc.prepare(model)
            weights = [model.blocks[0].weight, model.blocks[1].weight]
            found[wanted] = [isinstance(weight, RaggedTensor) for weight in weights]
            found[f"{wanted} is as it was"] = torch.equal(before, model.blocks[1].weight)
            acc.backward(loss_of(model, TOKENS))
            found[f"{wanted} has gradients"] = model.blocks[1].weight.grad is not None
    return found


def test_ignored_modules_are_left_alone() -> None:
    for found in run_ranks(leave_alone, 2):
        assert found.pop("list") == found.pop("pattern") == [True, False]
        assert all(found.values()), found


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


def wrap_what_is_only_read() -> list[list[str]]:
    found = []
    for plugin in (
        VeScaleFSDPPlugin(auto_wrap_policy="size_based_wrap", min_num_params=50),
        VeScaleFSDPPlugin(
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["NonDynamicallyQuantizableLinear"],
        ),
    ):
        with accelerator(fsdp_plugin=plugin) as acc:
            model = acc.prepare(WithAttention())
            acc.backward(model(torch.ones(2, 3, 8)).sum())
            modules = model.named_modules()
            found.append([name for name, each in modules if isinstance(each, FSDPModule)])
    return found


def test_no_unit_is_made_of_a_module_that_its_parent_only_reads() -> None:
    for found in run_ranks(wrap_what_is_only_read, 2):
        assert found == [["", "attention"], ["", "attention"]]


def train_in_half() -> None:
    with pytest.raises(ValueError, match="fp16") as error, accelerator(mixed_precision="fp16"):
        pass
    assert "GPU" in str(error.value)


def test_fp16_on_cpus_is_refused() -> None:
    run_ranks(train_in_half, 2)
