"""The seam to devices: nothing else asks one, and on a CPU nothing happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vescale_fsdp
from vescale_fsdp import devices, transfers

ASKED = re.compile(
    r"torch\.cuda\b|torch\.accelerator\b|(?<!devices)\.is_pinned\(|get_device_module|pin_memory\(\)"
)
CPU = torch.device("cpu")


def code_of(path: Path) -> str:
    """Without docstrings and comments."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    return re.sub(r"#.*", "", text)


def test_nothing_else_asks_a_device() -> None:
    root = Path(vescale_fsdp.__file__).parent
    found = {
        f"{path.relative_to(root)}: {match.group()}"
        for path in root.rglob("*.py")
        if path.name != "devices.py"
        for match in ASKED.finditer(code_of(path))
    }
    assert not found


def test_on_a_cpu_a_task_runs_at_once_and_its_work_comes_back() -> None:
    work = object()
    assert devices.start_beside(CPU, lambda: work) is work  # type: ignore[arg-type, return-value]
    lane, users = devices.Lane(CPU), devices.Users(CPU)
    with lane.entered():
        users.add()
        users.end()
    lane.join()
    assert lane.is_current
    assert devices.current_stream(CPU) is None
    devices.wait_event(CPU, object())


def test_what_comes_from_another_device_is_cast_after_it_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[tuple[torch.dtype, torch.dtype]] = []
    original = Tensor.copy_

    def noting(target: Tensor, source: Tensor, **options: Any) -> Tensor:
        copies.append((target.dtype, source.dtype))
        assert options == {"non_blocking": True}
        return original(target, source)

    monkeypatch.setattr(devices, "is_same", lambda one, other: False)
    monkeypatch.setattr(Tensor, "copy_", noting)
    target = torch.zeros(3, dtype=torch.bfloat16)
    transfers.copy_async(target, torch.ones(3))
    assert copies == [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
    assert target.tolist() == [1, 1, 1]


def test_staged_copies_are_copies() -> None:
    staging = transfers.Staging()
    source = torch.arange(6.0).view(2, 3).t()
    copied = staging.copy(source)
    staging.wait()
    assert copied.is_contiguous()
    assert torch.equal(copied, source)
    source.zero_()
    assert copied.sum() == 15


def test_numbers_of_the_host_on_a_cpu() -> None:
    made = transfers.from_host([0, 1, 1], torch.uint8, CPU)
    assert made.dtype == torch.uint8
    assert made.tolist() == [0, 1, 1]
