"""The boundary of a unit in the autograd graph: two identity functions around its forward.

::

    inputs --> [PostBackward] --> the unit's own graph --> [PreBackward] --> outputs

Backward runs from right to left. When all gradients of the outputs are there, `PreBackward`
unshards the unit's parameters. The nodes of the parameters end the unit's backward (`gather`). A
forward that trains no parameter has none: then `PostBackward` ends it, when all gradients of the
inputs are there, and only then it is in the graph.

Each is one node for all tensors, and not a hook on each tensor. So it runs once per call, and after
the last consumer. `PreBackward` returns aliases, so that in-place operations on a unit's output
work. `PostBackward` returns its inputs themselves: an in-place operation on an input that the
caller still uses would give wrong results silently, but this way torch raises.

A unit that returns several tensors may have computed one from another: logits from a hidden state.
The caller's hooks on the hidden state must see what comes back through the logits, so it cannot be
an alias. So of several outputs, the nodes that made them are watched instead: backward unshards the
parameters before the first of these nodes runs. An input that is returned as it is, beside others,
is the caller's tensor again. So is a leaf that forward has made: no backward goes through it. A
unit that has left out all of its modules may return a leaf of the caller: backward goes through
that, as it visits these modules on other ranks.

With ``create_graph=True`` the gradients of the inputs have a graph, which reads the parameters
too. Behind `PostBackward` a backward that reaches these gradients begins that of the call again. It
comes from the first unit to the last, and then back to the first, so all of these units are
unsharded at its turning point. A unit with nodes of parameters stays unsharded until then.

In forward mode (dual tensors), tangents pass through as their primal values.

What a forward puts into a container of its inputs is an output too.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.engine.containers import Copies, replace_tensors, tensors_requiring_grad

# An input of nodes. Autograd runs its accumulation in a backward without ``inputs`` only.
PLAIN = torch.zeros((), requires_grad=True)


class Call(ABC):
    """One forward of a unit that a backward may reach.

    Only the graph refers to it. If the graph is freed without a backward, the call is freed too, so
    the engine does not wait for it.

    Args:
        fqn: of the unit, for errors.
    """

    def __init__(self, fqn: str) -> None:
        self.where = repr(fqn) if fqn else "at the root"
        self.nodes: list[weakref.ref[Any]] = []  # of its parameters (`gather`)
        self.makes_graph = False  # whether the backward that runs makes one of gradients
        self.takes_gradients = False  # whether an input wants a gradient
        self.given: Sequence[torch.Tensor] = ()  # the inputs that do, until the forward ends
        self.inputs: Any = ()  # of a unit with nodes, until then: where to look for them
        self.handed_back: list[weakref.ref[torch.Tensor]] = []  # those that are outputs too

    @abstractmethod
    def pre_backward(self, is_plain: bool | None = None) -> None:
        """Called when backward has reached the outputs; again for each of several ones.

        Args:
            is_plain: whether it is a backward without ``inputs``; None: not known.
        """

    @abstractmethod
    def post_backward(self) -> None:
        """Called when the call's backward has ended: no node of it is left to run."""


def enter(call: Call, value: Any, copies: Copies | None = None) -> Any:
    """Pass the tensors in a unit's inputs through the boundary. Returns the value.

    Args:
        copies: gets the containers that were copied.
    """
    tensors = tensors_requiring_grad(value)
    call.takes_gradients = bool(tensors)
    if not tensors:
        return value
    refuse_functional(call)
    passed = _PostBackward.apply(call, *tensors)  # type: ignore[no-untyped-call]
    call.given = tensors
    return replace_tensors(value, tensors, passed, copies)


def refuse_functional(call: Call) -> None:
    """Raise within a transformation of ``torch.func`` that differentiates.

    Raises:
        NotImplementedError: it is one.
    """
    if compat.takes_functional_gradient():
        raise NotImplementedError(
            "torch.func.grad and torch.func.vjp through the sharded module "
            f"{call.where} are not supported yet by vescale_fsdp; use "
            "torch.autograd.grad, or call functional_call on a module that is not sharded"
        )


def leave(call: Call, value: Any, copies: Copies | None = None) -> tuple[Any, bool]:
    """Pass the tensors in a unit's outputs through the boundary.

    Returns the value, and whether a backward can reach any of its tensors.

    Args:
        copies: of the inputs' containers. What forward has put into them is an output too.
    """
    put = copies.new_items() if copies is not None and copies.made else []
    tensors: list[torch.Tensor] = []
    old: list[torch.Tensor] = []  # inputs that are returned as they are, and the caller's tensors
    new: list[torch.Tensor] = []
    found = tensors_requiring_grad((value, put) if put else value)
    # One that is alone passes the boundary, whoever made it.
    if call.inputs and (len(found) > 1 or (found and found[0].is_leaf)):
        first = call.nodes[0]()
        inputs = tensors_requiring_grad(call.inputs)  # and what forward has put or written there
        call.given = [each for each in inputs if compat.was_made_before(each, first)]
    for tensor in found:
        if _is_elsewhere(call, tensor):
            continue
        given = _given(call, tensor)
        if given is None:
            tensors.append(tensor)
        else:
            old.append(tensor)
            new.append(given)
    call.given = call.inputs = ()
    if tensors:
        call.handed_back += map(weakref.ref, new)
    elif old:  # the unit was skipped: a backward visits it all the same, as on other ranks
        tensors, old, new = old, [], []
    else:
        return value, False
    if call.nodes and compat.is_functional():
        for tensor in tensors:
            _watch(call, compat.unwrapped(tensor))
        tensors = []
    if len(tensors) > 1 and not compat.is_transforming():
        tensors = [tensor for tensor in tensors if not _watch(call, tensor)]
    passed = _PreBackward.apply(call, PLAIN, *tensors) if tensors else ()  # type: ignore[no-untyped-call]
    old, new = [*tensors, *old], [*passed, *new]
    if copies is not None and copies.made:
        copies.carry_back(lambda item: replace_tensors(item, old, new))
    return replace_tensors(value, old, new), True


def leave_again(
    call: Call, value: Any, copies: Copies, left: tuple[Any, bool] | None
) -> tuple[Any, bool]:
    """Pass what other hooks have made of the outputs, if they have, and as `leave`.

    Args:
        left: the result of `leave`; None: it was not called.
    """
    if left is None:
        return leave(call, value, copies)
    # A hook may have written to it, with parameters: then it is of another node.
    if value is left[0] and isinstance(value, torch.Tensor) and _is_of(call, value.grad_fn):
        return left
    found = tensors_requiring_grad(value)
    nodes = [tensor.grad_fn for tensor in found if not _is_elsewhere(call, tensor)]
    if all(_is_of(call, node) or _is_watched(call, node) for node in nodes):
        return value, left[1]
    return leave(call, value)[0], True


def _is_elsewhere(call: Call, tensor: torch.Tensor) -> bool:
    """Whether no backward through an output needs the unit."""
    if tensor.is_leaf:
        return not (isinstance(tensor, nn.Parameter) or _is_given(call, tensor))
    return bool(call.handed_back) and any(each() is tensor for each in call.handed_back)


def _given(call: Call, tensor: torch.Tensor) -> torch.Tensor | None:
    """The caller's tensor, if an output is an input of the unit, as it was."""
    node = tensor.grad_fn
    if isinstance(node, _PostBackward._backward_cls) and _is_of(call, node):
        return call.given[tensor.output_nr] if call.given else None
    return tensor if call.given and _is_given(call, tensor) else None


def _is_given(call: Call, tensor: torch.Tensor) -> bool:
    return any(tensor is each for each in call.given)


_CALLS = "vescale_fsdp calls"  # in the metadata of a node: those that returned its tensor


def _watch(call: Call, tensor: torch.Tensor) -> bool:
    """Call `Call.pre_backward` before the node of ``tensor`` runs. Returns whether it can.

    It cannot for a parameter and its views, which get another node when the unit is resharded, and
    for an input of the unit that is returned as it is.
    """
    base = tensor._base
    if base is not None and base.is_leaf and not base.requires_grad:
        base = None  # a reentrant checkpoint has made the view, without gradients
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
    makes_graph = torch.is_grad_enabled()
    with torch.no_grad():
        for call in reversed(calls):
            call.makes_graph = makes_graph
            call.pre_backward()


class _PreBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, plain: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call.makes_graph = torch.is_grad_enabled()
        with torch.no_grad():
            ctx.call.pre_backward(compat.will_run(ctx.next_functions[0][0]))
        return (None, None, *grads)

    @staticmethod
    def jvp(
        ctx: Any, _: None, plain: None, *tangents: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # A backward through a tangent reads the parameters too.
        return tuple(
            None if t is None else _PreBackward.apply(ctx.call, PLAIN, t)[0]  # type: ignore[no-untyped-call]
            for t in tangents
        )


def _of_a_graph(
    call: Call, grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Let a backward that reaches gradients of the inputs begin that of the call."""
    given = [grad for grad in grads if grad is not None and grad.requires_grad]
    passed = iter(_PreBackward.apply(call, PLAIN, *given) if given else ())  # type: ignore[no-untyped-call]
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
