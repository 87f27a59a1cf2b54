"""What steps issue and hold, equal to what files in ``golden`` say: collectives, bytes, memory.

Each line is a collective in the order of issue with its bytes, and how many bytes of unsharded
parameters have memory then. The first step is left out where it only finds out what the others do.
Files are written by ``VESCALE_FSDP_WRITE_GOLDEN=1``; look at what has changed, and say why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks

from .event_models import Checkpointed, Reentrant, Stack
from .models import make

pytestmark = pytest.mark.usefixtures("each_alone")

FOLDER = Path(__file__).parent / "golden"
NUM_STEPS = 3


class Lines(TorchDispatchMode):
    """Writes down the collectives of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._groups = [group for unit in units_in(model).values() for group in unit.groups]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and name != "recv_":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            live = sum(g.buffer.full.flat.nbytes for g in self._groups if is_live(g))
            self.lines.append(f"{name.strip('_')} {max(t.nbytes for t in tensors)} live {live}")
        return func(*args, **(kwargs or {}))


def is_live(group: Any) -> bool:
    return bool(group.buffer.full.is_materialized)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(width, 4), nn.Parameter(torch.randn(4, width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bd,edf,be->bf", x, self.up, self.router(x).softmax(-1))


class Text(nn.Module):
    """An embedding, blocks and a head, as language models have them."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(15))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return x


def sharded_stack(model_class: type[Stack] = Stack, **options: Any) -> nn.Module:
    model = make(model_class)
    for module in model.units.values():
        fully_shard(module, **options)
    return model


def sharded_text(block: Callable[[], nn.Module], num_blocks: int = 4, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Text(block, num_blocks)
    for each in model.blocks:
        fully_shard(each, **options)
    return fully_shard(model, **options)


def inputs(model: nn.Module) -> Tensor:
    return torch.arange(8) if isinstance(model, Text) else torch.ones(2, 16)


def train(model: nn.Module) -> None:
    model(inputs(model)).sum().backward()


def accumulate(model: Any) -> None:
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        train(model)


def evaluate_between(model: nn.Module) -> None:
    train(model)
    with torch.no_grad():
        model(inputs(model))


def frozen() -> nn.Module:
    model = make(Stack)
    model.a.requires_grad_(False)
    for module in model.units.values():
        fully_shard(module)
    return model


def listed() -> nn.Module:
    model = make(Stack)
    fully_shard(model.a)
    fully_shard([model.b, model.c])
    return fully_shard(model)


def nested() -> nn.Module:
    return sharded_text(lambda: fully_shard_parts(Block(32)))


def fully_shard_parts(block: Block) -> Block:
    fully_shard(block.up)
    fully_shard(block.down)
    return block


def with_lists() -> nn.Module:
    model: Any = sharded_stack()
    model.a.set_modules_to_forward_prefetch([model.b, model.c])
    model.c.set_modules_to_backward_prefetch([model.b, model.a])
    return model


def limited() -> nn.Module:
    model: Any = sharded_stack()
    model.set_reduce_scatter_max_input_buffers(2)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "plain": (sharded_stack, train),
    **{
        f"in_flight-{n}": (lambda n=n: sharded_stack(in_flight=n), train)  # type: ignore[misc]
        for n in (1, 3, 4)
    },
    "released": (lambda: sharded_stack(reshard_after_forward=True), train),
    "kept": (lambda: sharded_stack(reshard_after_forward=False), train),
    "accumulated": (sharded_stack, accumulate),
    "evaluated": (sharded_stack, evaluate_between),
    "checkpointed": (lambda: sharded_stack(Checkpointed), train),
    "reentrant": (lambda: sharded_stack(Reentrant), train),
    "frozen": (frozen, train),
    "listed": (listed, train),
    "nested": (nested, train),
    "lists": (with_lists, train),
    "limited": (limited, train),
    "zero2": (lambda: sharded_stack(sharding="zero2"), accumulate),
    "text": (lambda: sharded_text(lambda: Block(32), 8), train),
    "text-bf16": (lambda: sharded_text(lambda: Block(32), 8, mp_policy=BF16), train),
    "experts": (lambda: sharded_text(lambda: Experts(32)), train),
    "norms": (lambda: sharded_text(Norms, 10), train),
}
ON_FOUR = {
    "hsdp": (
        lambda: sharded_stack(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))),
        accumulate,
    ),
    "parted": (lambda: sharded_stack(reshard_after_forward=2), train),
}


def lines_of(names: list[str]) -> dict[str, list[str]]:
    """By scenario: what this rank does in each step but the first."""
    found = {}
    for name in names:
        make_model, run = (SCENARIOS | ON_FOUR)[name]
        model = make_model()
        found[name] = []
        for step in range(NUM_STEPS):
            with noted(model, found[name] if step else [], step):
                run(model)
            model.zero_grad()
    return found


@contextmanager
def noted(model: nn.Module, lines: list[str], step: int) -> Iterator[None]:
    with Lines(model) as recorded:
        yield
    lines += [f"step {step}", *recorded.lines]


@pytest.mark.parametrize(("scenarios", "size"), [(SCENARIOS, 2), (ON_FOUR, 4)], ids=["2", "4"])
def test_steps_do_what_they_did(scenarios: dict[str, Any], size: int) -> None:
    ranks = run_ranks(lines_of, size, list(scenarios), timeout_s=60)
    changed = {}
    for name in scenarios:
        assert all(rank[name] == ranks[0][name] for rank in ranks), f"ranks differ in {name}"
        found, path = "\n".join(ranks[0][name]) + "\n", FOLDER / f"{name}.txt"
        if os.environ.get("VESCALE_FSDP_WRITE_GOLDEN") == "1":
            path.write_text(found)
        elif found != path.read_text():
            changed[name] = found
    for name, found in changed.items():
        assert found == (FOLDER / f"{name}.txt").read_text(), name
