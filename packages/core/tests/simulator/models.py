"""Models of the scenarios, among them some that use several streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from .simulator import Simulator
from .streams import Stream

WIDTH = 16


class Layers(nn.Module):
    """Linear layers with a tanh between; each is a unit."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Blocks(Layers):
    """Blocks whose forwards save several tensors for backward; each is a unit."""

    def __init__(self) -> None:
        super().__init__(0)
        for _ in range(4):
            inner, outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.layers.append(nn.Sequential(inner, nn.GELU(), nn.Tanh(), outer))


class Checkpointed(Layers):
    """Runs the forward of each layer again in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.use_reentrant))  # type: ignore[no-untyped-call]
        return x


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class PartlyUsed(Layers):
    """The second layer is frozen, the third is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[3]):
            x = torch.tanh(layer(x))
        return x


class LeftOut(Layers):
    """Three layers run again together in backward. The first rank leaves out the first of them."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers

        def run(x: Tensor) -> Tensor:
            for layer in others[dist.get_rank() == 0 :]:
                x = torch.tanh(layer(x))
            return x

        result: Tensor = checkpoint(run, first(x), use_reentrant=False)  # type: ignore[no-untyped-call]
        return result


class Sent(Tensor):
    """Gathers itself: rows travel as two halves, which are added."""

    held: tuple[Tensor]

    @staticmethod
    def __new__(cls, held: Tensor) -> Sent:
        made = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return made(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device)  # type: ignore[no-any-return]

    def __init__(self, held: Tensor) -> None:
        self.held = (held,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        own_args, own_kwargs = tree_map_only(cls, lambda each: each.held[0], given)
        result = tree_map_only(Tensor, cls, func(*own_args, **own_kwargs))
        return return_and_correct_aliasing(func, *given, result)

    def __tensor_flatten__(self) -> Any:
        return ["rows"], None

    @property
    def rows(self) -> Tensor:
        return self.held[0]

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, size: Any, stride: Any) -> Sent:
        return Sent(inner["rows"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        (rows,) = self.held
        return (rows.bfloat16(), (rows - rows.bfloat16().float()).bfloat16()), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, Tensor], _: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            torch.add(*outputs, out=out)
            return None
        whole = outputs[0] + outputs[1]
        return whole, (whole, *outputs)


class Senders(Layers):
    """Layers whose weights gather themselves."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.weight = nn.Parameter(Sent(layer.weight.detach()))


class OnStream(nn.Module):
    """Runs a module on a stream of its own; in backward too, as torch does on an accelerator.

    Nobody waits for it before `joined`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.simulator: Simulator | None = None
        self._stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.simulator is None and not x.is_cuda:
            return self.module(x)  # type: ignore[no-any-return]
        if self.simulator is None:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                return self.module(x)  # type: ignore[no-any-return]
        if self._stream is None:
            self._stream = self.simulator.device.new_stream("user")
        before = self.simulator.device.current
        self._stream.wait_stream(before)
        x = _Switch.apply(x, self._stream, before)  # type: ignore[no-untyped-call]
        return _Switch.apply(self.module(x), before, self._stream)  # type: ignore[no-any-return, no-untyped-call]

    def joined(self, x: Tensor) -> Tensor:
        """Let the current stream wait for what `forward` has given."""
        if self.simulator is not None and self._stream is not None:
            self.simulator.device.current.wait_stream(self._stream)
        elif x.is_cuda:
            torch.cuda.current_stream().wait_stream(self._stream)
        return x


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Stream, before: Stream) -> Tensor:
        ctx.to, ctx.before = to, before
        to.device.current = to
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.before.wait_stream(ctx.to)
        ctx.to.device.current = ctx.before
        return grad, None, None


class Branches(nn.Module):
    """A branch of two layers on a stream of its own, as shared experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.beside = OnStream(nn.Sequential(self.layers[1], self.layers[2]))

    def forward(self, x: Tensor) -> Tensor:
        first, _, _, *others = self.layers
        x = torch.tanh(first(x))
        y = self.beside(x)
        for layer in others:
            x = torch.tanh(layer(x))
        return x + self.beside.joined(y)


class Shared(nn.Module):
    """One layer runs on two streams beside that of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.one, self.other = OnStream(self.layers[1]), OnStream(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        first, _, *others = self.layers
        x = torch.tanh(first(x))
        y, z = self.one(x), self.other(x)
        for layer in others:
            x = torch.tanh(layer(x))
        return x + self.one.joined(y) + self.other.joined(z)


class Apart(nn.Module):
    """Two layers, which are a unit together, run beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.one, self.other = OnStream(self.layers[1]), OnStream(self.layers[2])

    def units(self) -> list[Any]:
        first, *others = self.layers
        return [
            first,
            *([one, other] for one, other in zip(others[::2], others[1::2], strict=True)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        first, _, _, *others = self.layers
        x = torch.tanh(first(x))
        y, z = self.one(x), self.other(x)
        for layer in others:
            x = torch.tanh(layer(x))
        return x + self.one.joined(y) + self.other.joined(z)
