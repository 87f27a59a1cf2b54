"""Times the forward and the backward of each distinct block of a model, and of what is around them.

The model's root runs on a copy in which each block is a stand-in: it returns tensors of the shapes
that the trace has seen, and its backward returns gradients. So only the root's own parameters need
memory, and the time is that of embeddings, head and loss. The stand-ins see what the root gives to
each block. With this, one copy of each distinct block runs by itself::

    root     | embed | stand-ins | head, loss |    times of the root, inputs of the blocks
    block 0  | forward | backward |                the same for all blocks that equal it
    block 0  | forward | backward, recomputed |
    block 9  | forward | backward |
    block 9  | forward | backward, recomputed |

All ranks measure at the same time, as they will train. Distinct blocks differ in class, shapes,
dtypes, what is trained, flags of their modules, or inputs.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.spi import (
    current_backward,
    devices,
    map_tensors,
    pytree,
    recompute,
    tensors_requiring_grad,
)
from vescale_fsdp_tune.budget.twins import (
    Values,
    cast,
    cast_parameters,
    real_twin,
    seed_generators,
)
from vescale_fsdp_tune.costs.problem import BlockTimes

_MOST_S, _MOST_RUNS = 0.5, 7  # of the repetitions of one block


@dataclass(frozen=True)
class Shape:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


class Outputs:
    """What a block has returned in one call: a structure with tensors, without their values."""

    def __init__(self, value: Any) -> None:
        self.shapes: list[Shape] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self.shapes.append(Shape.of(tensor))
            return torch.empty(0)  # the recorder counts the tensor as long as it exists

        self._value = map_tensors(note, value)

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the structure with other tensors in it."""
        given = iter(tensors)
        return map_tensors(lambda _: next(given), self._value)


@dataclass
class Inputs:
    """The arguments of one call of a block, with values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.args, self.kwargs = map_tensors(_leaf, (self.args, self.kwargs))

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for one more run: caches as they were, tensors without gradients."""
        memo: dict[int, Any] = {}

        def renew(tensor: torch.Tensor) -> torch.Tensor:
            memo[id(tensor)] = _leaf(tensor).clone()  # no leaf: a block may change it in place
            return tensor

        with torch.enable_grad():
            map_tensors(renew, (self.args, self.kwargs))
        made: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((self.args, self.kwargs), memo)
        return made

    @property
    def kind(self) -> str:
        """A text that is the same for equal shapes and plain values."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        return f"{structure} {[_kind_of(leaf) for leaf in leaves]}"


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _kind_of(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(Shape.of(leaf))
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def kind_of(block: nn.Module) -> Hashable:
    """Return what is equal for blocks that take the same time on equal inputs."""
    parts: list[Hashable] = []
    for name, each in block.named_modules():
        flags = {
            key: re.sub(r"\d+", "*", value) if isinstance(value, str) else value
            for key, value in vars(each).items()
            if isinstance(value, bool | float | str)
        }
        absent = [key for key, value in vars(each).items() if value is None]
        parts.append((name, type(each), tuple(flags.items()), tuple(absent)))
        parts += [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*each._parameters.items(), *each._buffers.items())
            if tensor is not None
        ]
    return tuple(parts)


class _StandIn:
    """Replaces the forward of a block. Keeps the inputs of its first call.

    Args:
        outputs: of each call of a step, in order.
        make: makes a tensor on the device.
        dtype: that floating-point inputs are cast to; None: they are not.
    """

    def __init__(
        self,
        outputs: Sequence[Outputs],
        make: Callable[[Shape], torch.Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        self._outputs, self._make, self._dtype = outputs, make, dtype
        self._calls = 0
        self.inputs: Inputs | None = None

    def begin(self) -> None:
        """A step begins."""
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is None:
            self.inputs = Inputs(*cast((args, kwargs), self._dtype))
        recomputes = current_backward() != -1  # the last call first
        self._calls += -1 if recomputes else 1
        place = self._calls if recomputes else self._calls - 1
        if not 0 <= place < len(self._outputs):
            raise RuntimeError("a block runs more often than in the trace")
        outputs = self._outputs[place]
        made = [self._make(shape) for shape in outputs.shapes]
        wanted = [
            i
            for i, shape in enumerate(outputs.shapes)
            # What reentrant checkpoints recompute was without gradients in forward.
            if shape.requires_grad or (recomputes and shape.dtype.is_floating_point)
        ]
        if wanted:
            sources = tensors_requiring_grad((args, kwargs))
            anchor = torch.empty(0, device=made[wanted[0]].device, requires_grad=True)
            passed = _Jump.apply(  # type: ignore[no-untyped-call]
                self._make, [made[i] for i in wanted], anchor, *sources
            )
            for i, tensor in zip(wanted, passed, strict=True):
                made[i] = tensor
        return outputs.filled(made)


class _Jump(torch.autograd.Function):
    """From the inputs of a block to tensors in place of its outputs, and back."""

    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[[Shape], torch.Tensor],
        outputs: list[torch.Tensor],
        anchor: torch.Tensor,
        *sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.make, ctx.shapes = make, [Shape.of(each) for each in sources]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *(ctx.make(shape) for shape in ctx.shapes))


class Bench:
    """Times modules on a device.

    Args:
        device: of the compute.
        policy: dtypes of parameters, inputs and outputs.
        values: make tensors.
    """

    def __init__(self, device: torch.device, policy: MixedPrecisionPolicy, values: Values) -> None:
        self.device, self._policy, self._values = device, policy, values
        self._made: dict[Shape, torch.Tensor] = {}

    def root(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        outputs: Sequence[Sequence[Outputs]],
        inputs: Inputs,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> tuple[BlockTimes, list[Inputs | None]]:
        """Time a model without its blocks.

        Args:
            outputs: of each block, for each of its calls in a step.
            inputs: of the model.

        Returns:
            the root's times, and the inputs of the first call of each block (None: not called).
        """
        names = {id(child): name for name, child in module.named_modules()}
        twin = real_twin(module, self.device, self._values, blocks)
        stand_ins = [_StandIn(each, self._make, self._policy.param_dtype) for each in outputs]
        for block, stand_in in zip(blocks, stand_ins, strict=True):
            own = twin.get_submodule(names[id(block)])
            _forget_hooks(own)
            own.forward = stand_in
        cast_parameters(twin, self._policy.param_dtype)

        def run(*args: Any, **kwargs: Any) -> Any:
            for stand_in in stand_ins:
                stand_in.begin()
            args, kwargs = cast((args, kwargs), self._policy.param_dtype)
            return loss_of(cast(twin(*args, **kwargs), self._policy.output_dtype))

        forward_s, backward_s = self._time(run, twin, inputs)
        times = BlockTimes(forward_s, backward_s, forward_s)
        return times, [stand_in.inputs for stand_in in stand_ins]

    def block(self, block: nn.Module, inputs: Inputs, *, recomputes: bool) -> BlockTimes:
        """Time one block by itself.

        Args:
            recomputes: it can recompute its activations; time that too. With small tensors it
                takes much longer than another forward, because torch keeps account of each.
        """
        twin = real_twin(block, self.device, self._values)
        cast_parameters(twin, self._policy.param_dtype)
        forward_s, backward_s = self._time(twin, twin, inputs)
        recompute_s = forward_s
        if recomputes:
            recompute(twin)
            recompute_s = max(sum(self._time(twin, twin, inputs)) - forward_s - backward_s, 0.0)
        return BlockTimes(forward_s, backward_s, recompute_s)

    def _time(
        self, run: Callable[..., Any], twin: nn.Module, inputs: Inputs
    ) -> tuple[float, float]:
        begun = time.monotonic()
        forwards: list[float] = []
        backwards: list[float] = []
        while len(forwards) <= _MOST_RUNS:
            args, kwargs = inputs.fresh()
            seed_generators()
            devices.synchronize(self.device)
            start = time.perf_counter()
            with torch.enable_grad():
                output = run(*args, **kwargs)
            devices.synchronize(self.device)
            forwards.append(time.perf_counter() - start)
            targets = tensors_requiring_grad(output)
            grads = [self._make(Shape.of(each)) for each in targets]
            start = time.perf_counter()
            if targets:
                torch.autograd.backward(targets, grads)
                devices.synchronize(self.device)
            backwards.append(time.perf_counter() - start)
            twin.zero_grad(set_to_none=True)
            if len(forwards) > 1 and time.monotonic() - begun > _MOST_S:
                break
        # The least of them: others may use the machine too.
        return min(forwards[1:]), min(backwards[1:])

    def _make(self, shape: Shape) -> torch.Tensor:
        """Return a tensor of this shape. Its memory is shared with others; it has no history."""
        known = self._made.get(shape)
        if known is None:
            span = 1 + sum(
                (n - 1) * step for n, step in zip(shape.shape, shape.stride, strict=True)
            )
            memory = torch.empty(
                span if math.prod(shape.shape) else 0, dtype=shape.dtype, device=self.device
            )
            known = self._made[shape] = self._values.fill(memory)
        alias = torch.empty(0, dtype=shape.dtype, device=self.device)
        return alias.set_(known.untyped_storage(), 0, shape.shape, shape.stride)


def _forget_hooks(module: nn.Module) -> None:
    for each in module.modules():
        for name, value in vars(each).items():
            if name.startswith("_") and name.endswith("_hooks") and isinstance(value, dict):
                value.clear()
