"""What is compared: the same model, training, save and load with ours and with stock torch.

``stock`` is FSDP2 and ``torch.distributed.checkpoint`` saving into one folder, again and again;
``stock-folders`` the same with a new folder for each step, of which the last with a ``.metadata``
is loaded.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

from vescale_fsdp import Granularity, checkpoint, fully_shard

OURS, STOCK, FOLDERS = "ours", "stock", "stock-folders"


class Net(nn.Module):
    """Two units and a root that owns a bias, with dropout, which draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 33)
        )
        self.bias = nn.Parameter(torch.zeros(33))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.bias


def make(
    engine: str, width: int = 1501, seed: int = 0, granularity: Granularity | None = None
) -> tuple[nn.Module, torch.optim.AdamW]:
    """A sharded model and its optimizer; 1.2 MB with the states at the default width."""
    torch.manual_seed(seed)
    model = Net(width)
    for module in (model.layers[0], model.layers[3], model):
        if engine == OURS:
            fully_shard(module, granularity=granularity)
        else:
            fsdp2(module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step with the same batch and dropout on each rank: 1, 2 and 4 ranks are bitwise equal."""
    torch.manual_seed(step)
    loss = model(torch.randn(4, 32)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(engine: str, root: Path, step: int, model: nn.Module, optimizer: Any) -> None:
    """Save under ``root``, as one does with this engine. At least the last two are kept."""
    if engine == OURS:
        extra = {"step": step}
        checkpoint.save(root / f"step-{step}", model, optimizer, extra=extra, keep_last=2)
        return
    state = stock_state(model, optimizer) | {"step": step}
    folder = root / ("checkpoint" if engine == STOCK else f"step-{step}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a checkpoint already; no process group
        dcp.save(state, checkpoint_id=folder)
    if engine == FOLDERS and (not dist.is_initialized() or dist.get_rank() == 0):
        shutil.rmtree(root / f"step-{step - 2}", ignore_errors=True)


def newest(engine: str, root: Path) -> Path:
    """What is to be loaded after a crash."""
    if engine == OURS:
        return checkpoint.latest(root) or root / "nothing"
    if engine == STOCK:
        return root / "checkpoint"
    steps = [int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/.metadata")]
    return root / f"step-{max(steps, default=0)}"


def load(engine: str, path: Path, model: nn.Module, optimizer: Any) -> int:
    """Load a checkpoint; the step that it says it is of."""
    if engine == OURS:
        step = checkpoint.load(path, model, optimizer)["step"]
        assert type(step) is int, "it was saved so"
        return step
    state = stock_state(model, optimizer) | {"step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def stock_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state as the documentation of DCP takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer states as this rank holds them, by name."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}/{key}"] = value
    return found


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the bits of all parameters and states, whole: the same on any number of ranks."""
    return _digest(
        {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in state_of(model, optimizer).items()
        }
    )


def local_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the bits that this rank holds. Not collective."""
    return _digest(
        {
            name: each.to_local() if hasattr(each, "to_local") else each
            for name, each in state_of(model, optimizer).items()
        }
    )


def _digest(state: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, each in sorted(state.items()):
        total.update(name.encode())
        total.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
