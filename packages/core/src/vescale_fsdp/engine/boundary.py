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

A unit that returns several tensors may have computed one from another: logits from a hidden state.
The caller's hooks on the hidden state must see what comes back through the logits, so it cannot be
an alias. So of several outputs, the nodes that made them are watched instead: backward unshards the
parameters before the first of these nodes runs. An input that is returned as it is, beside others,
is the caller's tensor again. So is a leaf that forward has made: no backward goes through it.

With ``create_graph=True`` the gradients of the inputs have a graph, which reads the parameters
too. A backward that reaches these gradients begins that of the call again. It comes from the
first unit to the last, and then back to the first, so all of these units are unsharded at its
turning point.

In forward mode (dual tensors), tangents pass through as their primal values.

What a forward puts into a container of its inputs is an output too.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.engine.containers import Copies, replace_tensors, tensors_requiring_grad
from vescale_fsdp.engine.slot import Slot


class Model(Protocol):
    """The methods of the engine (`engine.Engine`) that a backward by parameters calls."""

    def slots(self) -> Iterator[Slot]:
        """The parameters of all units."""

    def pass_over_backward(self) -> None:
        """Take part in a backward that comes to no unit on this rank."""


class Call(ABC):
    """One forward of a unit that a backward may reach.

    Only the graph refers to it. If the graph is freed without a backward, the call is freed too, so
    the engine does not wait for it.

    Args:
        fqn: of the unit, for errors.
        model: that the unit is in; None: none that ranks train together.
    """

    def __init__(self, fqn: str, model: Model | None = None) -> None:
        self.model = model
        self.where = repr(fqn) if fqn else "at the root"
        self.takes_gradients = False  # whether an input wants a gradient
        self.given: Sequence[torch.Tensor] = ()  # the inputs that do, until the forward ends
        self.handed_back: list[weakref.ref[torch.Tensor]] = []  # those that are outputs too

    @abstractmethod
    def pre_backward(self) -> None:
        """Called when backward has reached the outputs; again for each of several ones."""

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
    call.given = tensors
    return replace_tensors(value, tensors, passed, copies)


def leave(call: Call, value: Any, copies: Copies | None = None) -> tuple[Any, bool]:
    """Pass the tensors in a unit's outputs through the boundary.

    Returns the value, and whether a backward can reach any of its tensors.

    Args:
        copies: of the inputs' containers. What forward has put into them is an output too.
    """
    found = tensors_requiring_grad((value, [] if copies is None else copies.new_items()))
    found = [tensor for tensor in found if not _is_elsewhere(call, tensor)]
    given = {id(tensor): _given(call, tensor) for tensor in found}
    call.given = ()
    if not found:
        return value, False
    tensors = [tensor for tensor in found if given[id(tensor)] is None]
    if tensors:
        call.handed_back += [weakref.ref(each) for each in given.values() if each is not None]
    else:  # the unit was skipped: a backward visits it all the same, as on other ranks
        given, tensors = {}, found
    if len(tensors) > 1 and not compat.is_transforming():
        tensors = [tensor for tensor in tensors if not _watch(call, tensor)]
    passed = _PreBackward.apply(call, *tensors) if tensors else ()  # type: ignore[no-untyped-call]
    old = [*tensors, *(tensor for tensor in found if given.get(id(tensor)) is not None)]
    new = (*passed, *(each for each in given.values() if each is not None))
    if copies is not None:
        copies.carry_back(lambda item: replace_tensors(item, old, new))
    return replace_tensors(value, old, new), True


def leave_again(
    call: Call, value: Any, copies: Copies, was_reachable: bool | None
) -> tuple[Any, bool]:
    """Pass what other hooks have made of the outputs, if they have, and as `leave`.

    Args:
        was_reachable: the result of `leave`; None: it was not called.
    """
    if was_reachable is None:
        return leave(call, value, copies)
    found = tensors_requiring_grad(value)
    nodes = [tensor.grad_fn for tensor in found if not _is_elsewhere(call, tensor)]
    if all(_is_of(call, node) or _is_watched(call, node) for node in nodes):
        return value, was_reachable
    return leave(call, value)[0], True


def models_behind(outputs: Iterable[Any]) -> list[Model]:
    """Find the models that tensors, or edges of a graph, come from. It looks at each node."""
    found: dict[Model, None] = {}
    nodes = [each.grad_fn if isinstance(each, torch.Tensor) else each.node for each in outputs]
    seen: set[Any] = {None}
    while nodes:
        node: Any = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for call in (*node.metadata.get(_CALLS, ()), getattr(node, "call", None)):
            if isinstance(call, Call) and call.model is not None:
                found[call.model] = None
        nodes += [each for each, _ in node.next_functions]
    return list(found)


def _is_elsewhere(call: Call, tensor: torch.Tensor) -> bool:
    """Whether no backward through an output needs the unit."""
    if tensor.is_leaf:
        return not isinstance(tensor, nn.Parameter)
    return any(each() is tensor for each in call.handed_back)


def _given(call: Call, tensor: torch.Tensor) -> torch.Tensor | None:
    """The caller's tensor, if an output is an input of the unit, as it was."""
    node = tensor.grad_fn
    is_input = isinstance(node, _PostBackward._backward_cls) and _is_of(call, node)
    return call.given[tensor.output_nr] if is_input and call.given else None


_CALLS = "vescale_fsdp calls"  # in the metadata of a node: those that returned its tensor


def _watch(call: Call, tensor: torch.Tensor) -> bool:
    """Call `Call.pre_backward` before the node of ``tensor`` runs. Returns whether it can.

    It cannot for a parameter and its views, which get another node when the unit is resharded, and
    for an input of the unit that is returned as it is.
    """
    base = tensor._base
    if tensor.is_leaf or _is_of(call, tensor.grad_fn) or (base is not None and base.is_leaf):
        return False
    # An in-place operation on a view gives other nodes to it and to its base.
    nodes: list[Any] = [tensor.grad_fn, *([] if base is None else [base.grad_fn])]
    for node in nodes:
        if not _is_watched(call, node):
            calls: list[Call] = node.metadata.setdefault(_CALLS, [])
            if not calls:
                node.register_prehook(partial(_reach, calls))
            calls.append(call)
    return True


def _is_watched(call: Call, node: Any) -> bool:
    return node is not None and call in node.metadata.get(_CALLS, ())


def _is_of(call: Call, node: Any) -> bool:
    return getattr(node, "call", None) is call


def _reach(calls: list[Call], _: tuple[torch.Tensor | None, ...]) -> None:
    """Begin the backward of the calls that returned a tensor: of the outermost unit first."""
    with torch.no_grad():
        for call in reversed(calls):
            call.pre_backward()


class _PreBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            ctx.call.pre_backward()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # A backward through a tangent reads the parameters too.
        return tuple(
            None if t is None else _PreBackward.apply(ctx.call, t)[0]  # type: ignore[no-untyped-call]
            for t in tangents
        )


def _of_a_graph(
    call: Call, grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Let a backward that reaches gradients of the inputs begin that of the call."""
    given = [grad for grad in grads if grad is not None and grad.requires_grad]
    passed = iter(_PreBackward.apply(call, *given) if given else ())  # type: ignore[no-untyped-call]
    return tuple(
        next(passed) if grad is not None and grad.requires_grad else grad for grad in grads
    )


class _PostBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            ctx.call.post_backward()
        if torch.is_grad_enabled():  # a backward of these gradients needs the parameters again
            grads = _of_a_graph(ctx.call, grads)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Torch wants views where forward returns its inputs. A node here would let the unit go
        # while the backward through the primal values still runs.
        return tuple(None if t is None else t.view_as(t) for t in tangents)
