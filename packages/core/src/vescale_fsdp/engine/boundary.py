"""The boundary of a unit in the autograd graph: two identity functions around its forward.

::

    inputs --> [PostBackward] --> the unit's own graph --> [PreBackward] --> outputs

Backward runs from right to left. When all gradients of the outputs are there, `PreBackward`
unshards the unit's parameters. When all gradients of the inputs are there, the unit's backward has
ended, and `PostBackward` reduces its gradients.

Each is one node for all tensors, and not a hook on each tensor. So it runs once per call, and after
the last consumer. `PreBackward` returns aliases, so that in-place operations on a unit's output
work. `PostBackward` returns its inputs themselves: an in-place operation on an input that the
caller still uses would give wrong results silently, but this way torch raises.

In forward mode (dual tensors), tangents pass through as their primal values.

What a forward puts into a container of its inputs is an output too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from vescale_fsdp import compat
from vescale_fsdp.engine.containers import Copies, replace_tensors, tensors_requiring_grad


class Call(ABC):
    """One forward of a unit that a backward may reach.

    Only the graph refers to it. If the graph is freed without a backward, the call is freed too, so
    the engine does not wait for it.

    Args:
        fqn: of the unit, for errors.
    """

    def __init__(self, fqn: str) -> None:
        self.where = repr(fqn) if fqn else "at the root"
        self.takes_gradients = False  # whether an input wants a gradient

    @abstractmethod
    def pre_backward(self) -> None:
        """Called when backward has reached the outputs."""

    @abstractmethod
    def post_backward(self) -> None:
        """Called when all gradients of the inputs are there: the call's backward has ended."""


def enter(call: Call, value: Any, copies: Copies | None = None) -> Any:
    """Pass the tensors in a unit's inputs through the boundary. Returns the value.

    Args:
        copies: gets the containers that were copied.
    """
    tensors = tensors_requiring_grad(value)
    call.takes_gradients = bool(tensors)
    if not tensors:
        return value
    if compat.takes_functional_gradient():
        raise NotImplementedError(
            "torch.func.grad and torch.func.vjp through the sharded module "
            f"{call.where} are not supported yet by vescale_fsdp; use "
            "torch.autograd.grad, or call functional_call on a module that is not sharded"
        )
    passed = _PostBackward.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return replace_tensors(value, tensors, passed, copies)


def leave(call: Call, value: Any, copies: Copies | None = None) -> tuple[Any, bool]:
    """Pass the tensors in a unit's outputs through the boundary.

    Returns the value, and whether a backward can reach any of its tensors.

    Args:
        copies: of the inputs' containers. What forward has put into them is an output too.
    """
    tensors = tensors_requiring_grad((value, [] if copies is None else copies.new_items()))
    if not tensors:
        return value, False
    passed = _PreBackward.apply(call, *tensors)  # type: ignore[no-untyped-call]
    if copies is not None:
        copies.carry_back(lambda item: replace_tensors(item, tensors, passed))
    return replace_tensors(value, tensors, passed), True


def leave_again(
    call: Call, value: Any, copies: Copies, was_reachable: bool | None
) -> tuple[Any, bool]:
    """Pass what other hooks have made of the outputs, if they have, and as `leave`.

    Args:
        was_reachable: the result of `leave`; None: it was not called.
    """
    if was_reachable is None:
        return leave(call, value, copies)
    nodes = [tensor.grad_fn for tensor in tensors_requiring_grad(value)]
    if all(getattr(node, "call", None) is call for node in nodes):
        return value, was_reachable
    return leave(call, value)[0], True


class _PreBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the second backward would find freed parameters
            raise NotImplementedError(
                f"a backward with create_graph=True through the sharded module "
                f"{ctx.call.where} is not supported yet by vescale_fsdp; compute "
                "this term without create_graph, or on a module that is not sharded"
            )
        ctx.call.pre_backward()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # A backward through a tangent reads the parameters too.
        return tuple(
            None if t is None else _PreBackward.apply(ctx.call, t)[0]  # type: ignore[no-untyped-call]
            for t in tangents
        )


class _PostBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call.post_backward()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Torch wants views where forward returns its inputs. A node here would let the unit go
        # while the backward through the primal values still runs.
        return tuple(None if t is None else t.view_as(t) for t in tangents)
