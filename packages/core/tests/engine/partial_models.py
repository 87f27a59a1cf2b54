"""Models of which each rank runs other units, and training them beside a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp.engine.unit import units_in

from .helpers import Tensors, averaged_gradients, full_gradients, shard_units
from .models import inputs_of, make

NUM_BLOCKS = 4
ALL = tuple(range(NUM_BLOCKS))

Choice = Callable[[int, int], Sequence[int]]  # the blocks that run, of step and rank


class Block(nn.Module):
    """One layer and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Runs the chosen blocks between two layers of the root. Each block is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList(self.make_block() for _ in ALL)

    def make_block(self) -> nn.Module:
        return Block()

    @property
    def units(self) -> Iterable[nn.Module]:
        return self.blocks

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = torch.tanh(self.first(x))
        for index in chosen:
            x = self.run(index, x)
        return self.last(x)

    def run(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index](x)


class Recomputed(Stack):
    """Each block is run again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def run(self, index: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[index], x, use_reentrant=self.use_reentrant)


class RecomputedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputingBlocks(Stack):
    """As `Recomputed`, from inside of the units."""

    def make_block(self) -> nn.Module:
        return RecomputedInside()


class Pair(nn.Module):
    """Two units and a layer of its own, which is used in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(5, 5)
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor, parts: int) -> Tensor:
        x = torch.tanh(self.own(x))
        if parts & 1:
            x = self.left(x)
        return self.right(x) if parts & 2 else x


class Nested(Stack):
    """Blocks with units inside; a block, one unit of it, or both may be left out.

    A chosen number is ``4 * block + parts``.
    """

    def make_block(self) -> nn.Module:
        return Pair()

    @property
    def units(self) -> Iterable[nn.Module]:
        return [unit for block in self.blocks for unit in (block.left, block.right, block)]

    def run(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index // 4](x, index % 4)


class Experts(Stack):
    """Sends each row to one expert, as its inputs say; an expert without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, NUM_BLOCKS)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = torch.tanh(self.first(x))
        weights, experts = self.router(4 * x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index in ALL:
            rows = (experts == index).nonzero().view(-1)
            if len(rows):
                found = self.blocks[index](x[rows]) * weights[rows, None]
                result = result.index_add(0, rows, found)
        return self.last(result)


class Embeddings(Stack):
    """The blocks are tables: no gradient goes on from them."""

    def make_block(self) -> nn.Module:
        return nn.Embedding(7, 5)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        rows = (x[:, 0] * 3).long() % 7
        return self.last(sum((self.blocks[i](rows) for i in chosen), self.first(x)))


class Ungraded(Stack):
    """The first block runs, in a way that leaves it no gradient on the even ranks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def run(self, index: int, x: Tensor) -> Tensor:
        if index or dist.get_rank() % 2:
            return super().run(index, x)
        if self.how == "unused":
            super().run(index, x)
            return x
        if self.how == "detached":
            return x + super().run(index, x).detach()
        with torch.no_grad():
            gate = super().run(index, x)
        return x * gate


class Heads(Stack):
    """One loss for each chosen head: the units come last, and none goes through another."""

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = torch.tanh(self.first(x))
        return sum((self.blocks[i](x) for i in chosen), 0 * self.last(x))


# Models that a rank runs a part of: ``leaves_out`` says whether this forward does


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Stretch(nn.Module):
    """Three units that run again together."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.first = layer(), layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            y: Tensor = self.c(self.b(x if leaves_out else self.a(x)))
            return y

        y: Tensor = checkpoint(run, self.first(x), use_reentrant=self.reentrant)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]


class ReentrantStretch(Stretch):
    reentrant = True


class InsideOfStretch(nn.Module):
    """A unit inside of one that runs again, in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.inner = layer(), layer(), layer()
        self.outer = nn.ModuleList([self.own, self.inner])

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            x = self.own(x)
            return x if leaves_out else self.inner(x)

        y: Tensor = checkpoint(run, self.first(x), use_reentrant=True)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.inner, self.own]


class NestedCheckpoints(nn.Module):
    """A reentrant checkpoint inside of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return x if leaves_out else self.a(x)

        def outer(x: Tensor) -> Tensor:
            y: Tensor = self.b(checkpoint(inner, x, use_reentrant=True))
            return y

        y: Tensor = checkpoint(outer, self.first(x), use_reentrant=False)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a, self.b]


class EmptyRoot(nn.Module):
    """The root has no parameters of its own; a rank may run none of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.a = layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        y: Tensor = x * 2 if leaves_out else self.a(x)
        return y

    @property
    def units(self) -> list[nn.Module]:
        return [self.a]


class EmptyAround(nn.Module):
    """Units around others have no parameters, and run for the first time in a later step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layer()
        self.around = nn.Sequential(nn.ModuleList([layer(), layer()]), nn.Identity())
        self.is_first = True

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.first(x)
        for each in () if self.is_first else self.inside:
            x = x if leaves_out and each is self.inside[0] else each(x)
        self.is_first = False
        return x

    @property
    def inside(self) -> nn.ModuleList:
        inside = self.around[0]
        assert isinstance(inside, nn.ModuleList)
        return inside

    @property
    def units(self) -> list[nn.Module]:
        return [*self.inside, self.around]


class Twins(nn.Module):
    """Two modules in one unit, of which a rank may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.between, self.other = layer(), layer(), layer()

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.between(self.one(x))
        y: Tensor = x if leaves_out else self.other(x)
        return y


class FrozenBehind(nn.Module):
    """Whether the inputs of a frozen unit want gradients depends on what a rank leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = layer(), layer(), layer()
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, leaves_out: bool, skips_frozen: bool) -> Tensor:
        x = x if leaves_out else self.first(x)
        y: Tensor = self.last(x if skips_frozen else self.frozen(x))
        return y


class EmptyBetween(nn.Module):
    """A unit without parameters between two others, under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=self.reentrant)
        return x


# Which blocks run


def _numbers(step: int, rank: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2**NUM_BLOCKS, (3,), generator=generator).tolist()


def everywhere(step: int, rank: int) -> Sequence[int]:
    return ALL


def not_on_rank_0_at_first(step: int, rank: int) -> Sequence[int]:
    return (0, 2, 3) if step == 0 and rank == 0 else ALL


def not_on_rank_0_later(step: int, rank: int) -> Sequence[int]:
    return ALL[: NUM_BLOCKS - step] if rank == 0 else ALL


def none_on_rank_1(step: int, rank: int) -> Sequence[int]:
    return () if rank == 1 else ALL


def even_or_odd(step: int, rank: int) -> Sequence[int]:
    return ALL[(rank + step) % 2 :: 2]


def one_each(step: int, rank: int) -> Sequence[int]:
    """In the first pass with two ranks nobody runs the last two blocks."""
    return ((rank + step) % NUM_BLOCKS,)


def early_exit(step: int, rank: int) -> Sequence[int]:
    return ALL[: 1 + (step + 3 * rank) % NUM_BLOCKS]


def at_random(step: int, rank: int) -> Sequence[int]:
    return [index for index in ALL if _numbers(step, rank)[0] >> index & 1]


def at_random_after_all(step: int, rank: int) -> Sequence[int]:
    return at_random(step, rank) if step else ALL


def in_reverse_after_all(step: int, rank: int) -> Sequence[int]:
    return at_random_after_all(step, rank)[::-1]


def new_on_rank_0(step: int, rank: int) -> Sequence[int]:
    """After a first pass in which nobody ran them, rank 0 alone runs the second and the last."""
    return ALL if step == 2 or (step == 1 and rank == 0) else (0, 2)


def new_on_all(step: int, rank: int) -> Sequence[int]:
    return ALL if step else (0, 2)


def parts_at_random(step: int, rank: int) -> Sequence[int]:
    """For `Nested`: in half of the cases a block is left out, else any of its units may be."""
    runs, parts, more = _numbers(step, rank)
    return [4 * i + ((parts + more * i) >> i) % 4 for i in ALL if runs >> i & 1]


# Training


def plain_loss(model: nn.Module, step: int, choice: Choice) -> Tensor:
    rank = dist.get_rank()
    return model(inputs_of(step, rank), choice(step, rank)).square().mean()


def assert_same_gradients(found: Tensors, expected: Tensors) -> None:
    """The same to rounding: the sums of autograd and of ranks have no fixed order here.

    Where no rank has a gradient there may be zeros: "auto" asks only until all were used.
    """
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None:
            assert other is None or not other.any(), f"{name} has a gradient, and nobody used it"
            continue
        assert other is not None, f"{name} has no gradient"
        torch.testing.assert_close(
            other, tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_all_released(model: nn.Module) -> None:
    gathered = [name for name, unit in units_in(model).items() if not unit.is_sharded]
    assert not gathered, f"still gathered after backward: {gathered}"


def train_like_plain(
    model_class: Callable[..., nn.Module],
    args: tuple[object, ...],
    choice: Choice,
    options: dict[str, Any],
    num_steps: int = 4,
    num_micro_batches: int = 1,
    evaluate: Callable[[], Any] | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Losses, gradients and so weights are those of a plain model with averaged gradients.

    Args:
        choice: the blocks that run.
        options: of ``fully_shard``.
        num_micro_batches: backwards a step, of which the last one synchronizes.
        evaluate: a context in which the model is also run, before each step, with other blocks.
        prepare: is called with each of the two models before anything else.
    """
    plain, sharded = make(model_class, *args), make(model_class, *args)
    prepare(plain)
    prepare(sharded)
    shard_units(sharded, sharded.units, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    check = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    for step in range(num_steps):
        if evaluate is not None:
            with evaluate():
                check(*(plain_loss(m, step + 7, choice) for m in (sharded, plain)))
        for micro in range(num_micro_batches):
            sharded.set_requires_gradient_sync(micro == num_micro_batches - 1)
            losses = [plain_loss(model, step + 10 * micro, choice) for model in (sharded, plain)]
            check(*losses)
            for loss in losses:
                loss.backward()
        expected = averaged_gradients(plain)
        assert_same_gradients(full_gradients(sharded), expected)
        assert_all_released(sharded)
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
