"""`torch.compile`: what runs are the numbers of one process, and from the third step on, nothing
is compiled again. It is compiled into as many graphs as with FSDP2, with as many breaks.

`test_compiled` asks the same of a transformer, in ten steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import vescale_fsdp

from .asking import (
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    batch,
    blocks_of,
    check_models,
    is_sharded,
    listed,
    made,
    named,
    pair,
    part,
    squares,
)

dynamo = torch._dynamo.config
BACKEND = "aot_eager"


def compile_blocks(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=BACKEND, **options)
    return model


def compile_forwards(model: Any, **options: Any) -> Any:
    """Without the hooks around them."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=BACKEND, **options)
    return model


def compile_model(model: Any, **options: Any) -> Any:
    model.compile(backend=BACKEND, **options)
    return model


def compile_around(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=BACKEND, **options)


def compile_parts(model: Any, **options: Any) -> Any:
    """What is recomputed in a block, without its hooks."""
    for block in model.blocks:
        block.mlp.compile(backend=BACKEND, **options)
    return model


class SeesParameters(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if isinstance(self.a.weight, nn.Parameter) else 0 * y


class Recomputed(Net):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class RecomputesPart(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.reentrant = nn.LayerNorm(WIDTH), Mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant)


class Penalized(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = sum(param.square().sum() for param in self.parameters())  # type: ignore[assignment]
        return super().forward(x)


def with_penalty(net: Any, model: Any, x: Tensor) -> Tensor:
    loss = squares(net, x)
    return loss + 0.1 * sum(block.penalty for block in model.blocks)


def freezes_parts() -> Net:
    model = Net()
    for block in model.blocks:
        block.a.requires_grad_(False)  # type: ignore[union-attr]
    return model


def product_with_head(model: Any, y: Tensor) -> Tensor:
    return (y @ model.head.weight).square().mean()


def head_is_read() -> Callable[[Any, Any, Tensor], Tensor]:
    """A compiled loss reads a weight of the root, which is sharded between steps."""
    product = torch.compile(product_with_head, backend=BACKEND)

    def loss(net: Any, model: Any, x: Tensor) -> Tensor:
        return (product if is_sharded(model) else product_with_head)(model, net(x))

    return loss


def train(
    compiles: Callable[..., Any],
    make: Callable[[], nn.Module] = Net,
    loss: Callable[[Any, Any, Tensor], Tensor] = lambda net, model, x: squares(net, x),
    accumulates: bool = False,
    evaluates: bool = False,
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Four steps, as one process that compiles nothing."""
    plain, model = pair(make, **options)
    optimizers = [SGD(each.parameters(), 0.1) for each in (plain, model)]
    net = compiles(model, **(compile_options or {}))
    for step in range(4):
        if not accumulates:
            for optimizer in optimizers:
                optimizer.zero_grad()
        x = batch(step)
        loss(plain, plain, x).backward()
        with dynamo.patch(error_on_recompile=step >= 2):
            loss(net, model, part(x)).backward()
        check_models(plain, model, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
        if evaluates:
            with torch.no_grad(), dynamo.patch(error_on_recompile=step >= 2):
                found, expected = net.eval()(part(x)), plain.eval()(x)
            torch.testing.assert_close(found, part(expected))
            net.train()
            plain.train()


def another_shape_is_compiled() -> None:
    """The switch that the others rely on does raise."""
    _, model = pair()
    compile_blocks(model, dynamic=False)
    for _ in range(2):
        squares(model, batch(0)[:3]).backward()
    with (
        dynamo.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError),
    ):
        squares(model, batch(0)[:4]).backward()


def counts(library: Any, compiles: Callable[..., Any]) -> tuple[int, int, int]:
    """Graphs, operators and breaks of three steps."""
    torch._dynamo.reset()
    counters.clear()
    model = made(Net)
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in blocks_of(model):
        library.fully_shard(block, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    net = compiles(model)
    for step in range(3):
        model.zero_grad()
        squares(net, part(batch(step))).backward()
    stats = counters["stats"]
    breaks = sum(counters["graph_break"].values())
    return stats["unique_graphs"], stats["calls_captured"], breaks


def as_often_as_fsdp2(compiles: Callable[..., Any]) -> None:
    ours, theirs = (counts(library, compiles) for library in (vescale_fsdp, torch.distributed.fsdp))
    assert ours[0] == theirs[0] > 0, f"{ours[0]} graphs, {theirs[0]} with FSDP2"
    assert ours[1] == theirs[1] > 0, f"{ours[1]} operators, {theirs[1]} with FSDP2"
    assert ours[2] <= theirs[2], f"{ours[2]} breaks, {theirs[2]} with FSDP2"


def whole_graph_is_refused() -> None:
    _, model = pair()
    net = compile_around(model, fullgraph=True)
    with pytest.raises(Exception, match=r"graph|compile|disable"):
        net(part(batch(0)))


def trained_kwargs() -> dict[str, dict[str, Any]]:
    whole = {"compile_options": {"fullgraph": True}}
    return {
        "blocks": {"compiles": compile_blocks},
        "blocks, a graph each": {"compiles": compile_blocks, **whole},
        "forwards": {"compiles": compile_forwards},
        "forwards, a graph each": {"compiles": compile_forwards, **whole},
        "blocks, evaluated": {"compiles": compile_blocks, "evaluates": True},
        "forwards, evaluated": {"compiles": compile_forwards, "evaluates": True},
        "blocks that look at types": {
            "compiles": compile_blocks,
            "make": lambda: Net(SeesParameters),
        },
        "blocks, frozen parts": {"compiles": compile_blocks, "make": freezes_parts},
        "blocks, gradients add up": {"compiles": compile_blocks, "accumulates": True},
        "blocks, recomputed": {"compiles": compile_blocks, "make": Recomputed},
        "blocks, penalized": {
            "compiles": compile_blocks,
            "make": lambda: Net(Penalized),
            "loss": with_penalty,
        },
        "parts that are recomputed": {
            "compiles": compile_parts,
            "make": lambda: Net(lambda: RecomputesPart(False)),
        },
        "parts that are recomputed, reentrant": {
            "compiles": compile_parts,
            "make": lambda: Net(lambda: RecomputesPart(True)),
        },
        "model": {"compiles": compile_model},
        "around the model": {"compiles": compile_around},
        "model, root resharded": {"compiles": compile_model, "reshard_after_forward": True},
        "model, evaluated": {"compiles": compile_model, "evaluates": True},
        "model, recomputed": {"compiles": compile_model, "make": Recomputed},
    }


def cases() -> Cases:
    found: Cases = {}
    for name, options in trained_kwargs().items():
        found[name] = Case(lambda options=options: train(**options))
    found["a loss that reads the head"] = Case(
        lambda: train(lambda model: model, loss=head_is_read())
    )
    found["another shape"] = Case(another_shape_is_compiled)
    found["blocks, counted"] = Case(lambda: as_often_as_fsdp2(compile_blocks))
    found["model, counted"] = Case(lambda: as_often_as_fsdp2(compile_around))
    found["whole model in one graph"] = Case(whole_graph_is_refused)
    return found


OTHERWISE = {
    "blocks, penalized": "torch's partitioner: a gradient of a parameter is no output of the graph"
}
CASES = listed(cases(), OTHERWISE)


def answers(*names: str) -> Answers:
    return answer(CASES, names)


# Dynamo looks for ``.grad`` where there is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_compiled_training_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
