"""The unsharded parameters of one forward of a unit, as the results of two nodes of autograd.

::

    shards (leaves) --> [Gather] --> unsharded views --> the unit's own graph --> outputs

A node's backward gets all gradients of its parameters at once, and adds them to the gradient
buffer. That it runs *is* "the gradients of this forward are there", and None among them *is* "not
used": no hook runs for each parameter.

Of the nodes that are ready, autograd runs the one first that was made last. The first of the two
was made before all others of the unit. So when it runs, nothing of the unit's backward is left, and
the unit may be resharded. The second one has the later half of the parameters, and a number that
lets it run as soon as their gradients are there. That is when half of the compute is done, and it
is the turn of the all-gather for the next unit (`program.window`).

A node returns no gradients, because those of the shards are known only after the reduction. For
``torch.autograd.grad(loss, shards)``, which sets no ``.grad``, it returns their averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.boundary import PLAIN
from vescale_fsdp.engine.fsdp_param import FSDPParam, local_of
from vescale_fsdp.ragged import redistribute

if TYPE_CHECKING:
    from vescale_fsdp.engine.group import Group
    from vescale_fsdp.engine.unit import Unit


class Half:
    """Parameters of a unit that one node has. Lists, because nothing is looked up for each."""

    def __init__(self) -> None:
        self.fsdp_params: list[FSDPParam] = []
        self.groups: list[Group] = []
        self.indices: list[int] = []  # in the group
        self.attributes: list[dict[str, Any] | None] = []  # of users; None: a view has its own

    def append(self, group: Group, index: int) -> None:
        """Add a parameter."""
        fsdp_param = group.fsdp_params[index]
        self.fsdp_params.append(fsdp_param)
        self.groups.append(group)
        self.indices.append(index)
        self.attributes.append(fsdp_param.attributes if fsdp_param.is_viewed_plainly else None)


class Trained:
    """The parameters that forwards of a unit train, as long as none is frozen, or moved."""

    def __init__(self, unit: Unit, flags: list[list[bool]]) -> None:
        self.flags, self._shadows = flags, [group.shadows for group in unit.groups]
        items = [
            (group, index)
            for group, trains in zip(unit.groups, flags, strict=True)
            for index, each in enumerate(trains)
            if each
        ]
        size = sum(group.sizes[index] for group, index in items)
        first, second, so_far = Half(), Half(), 0
        for group, index in items:
            (first if 2 * so_far < size else second).append(group, index)
            so_far += group.sizes[index]
        self.halves = [half for half in (first, second) if half.fsdp_params]
        # For each group the place of each parameter among those that train, or None.
        places = iter(range(len(items)))
        self.places = [[next(places) if each else None for each in trains] for trains in flags]

    @classmethod
    def of(cls, unit: Unit) -> Trained:
        """Return what the next forward trains."""
        flags = [group.flags for group in unit.groups]
        known: Trained | None = unit.trained
        shadows = [group.shadows for group in unit.groups]  # others after a move
        if known is None or known.flags != flags or known._shadows != shadows:
            known = unit.trained = cls(unit, flags)
        return known


class Gathered:
    """The unsharded parameters of one forward. The nodes hold it, so it lives as long as they do.

    Shadows that last until the backward hold nodes. So it knows the forward's `hooks.Call` weakly:
    if what the forward has returned was dropped, no backward awaits it.
    """

    def __init__(self, unit: Unit, engine: Any, call: Any, new_call: Callable[[], Any]) -> None:
        self.unit, self._engine, self._new_call = unit, engine, new_call
        self._call = weakref.ref(call)
        self.trained = Trained.of(unit)
        self.first = 0  # the id of the node that runs last
        self._later_call: Any = None  # in place of one that was dropped

    def show(self, nodes: list[weakref.ref[Any]]) -> None:
        """Show the unsharded parameters: as results of nodes those that train, and the others.

        Args:
            nodes: gets weak references to the nodes.
        """
        made: list[torch.Tensor] = []
        for place, half in enumerate(self.trained.halves):
            leaves: list[torch.Tensor] = [fsdp_param.sharded for fsdp_param in half.fsdp_params]
            with compat.without_torch_function():  # a tenth of the time for each attribute
                hooks = [
                    leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves
                ]
            if any(hooks):
                leaves = [fsdp_param.leaf() for fsdp_param in half.fsdp_params]
            plain = PLAIN if place else compat.apply_outside(End, self, PLAIN)
            views = compat.apply_outside(Gather, self, place, nodes, plain, *leaves)
            for view, attributes, fsdp_param in zip(
                views, half.attributes, half.fsdp_params, strict=True
            ):
                if attributes is None:
                    fsdp_param.dress(view)
                else:
                    view.__dict__ = attributes
            made += views
        for group, places in zip(self.unit.groups, self.trained.places, strict=True):
            fsdp_params = group.fsdp_params
            group.show(
                [
                    fsdp_params[index].whole if place is None else made[place]
                    for index, place in enumerate(places)
                ]
            )

    def call(self) -> Any:
        """The call of the forward, or another one if that was dropped."""
        call = self._call()
        if call is None:  # a loss depends on a parameter, and on nothing that forward has returned
            call = self._later_call = self._new_call()
            self._call = weakref.ref(call)
        return call

    def take(
        self, node: Any, place: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Add these gradients to the buffers. Returns what autograd is to get of them."""
        half = self.trained.halves[place]
        is_plain = compat.will_run(node.next_functions[0][0])
        runs: list[bool | None] = [True] * len(grads)
        if not is_plain:
            runs = [compat.will_run(each) for each, _ in node.next_functions[1:]]
        with torch.no_grad():
            self.call().pre_backward(is_plain or any(runs))
        if torch.is_grad_enabled():
            for fsdp_param, grad, wanted in zip(half.fsdp_params, grads, runs, strict=True):
                if grad is not None and wanted is not False:
                    fsdp_param.refuse_graph()
        self._add(half, [grad if each else None for grad, each in zip(grads, runs, strict=True)])
        if place:
            with plain_tensors():
                self._engine.half_of_backward(self.unit)
        elif not is_plain:
            self.end()
        if is_plain:
            return [None] * len(grads)
        captured = zip(half.fsdp_params, grads, runs, strict=True)
        return [
            _averaged(grad, fsdp_param) if grad is not None and each is None else None
            for fsdp_param, grad, each in captured
        ]

    def _add(self, half: Half, grads: Sequence[torch.Tensor | None]) -> None:
        hooked = self.unit.hooked
        by_group: dict[Group, dict[int, torch.Tensor]] = {group: {} for group in self.unit.groups}
        items = zip(half.fsdp_params, half.groups, half.indices, grads, strict=True)
        with compat.without_torch_function():
            for fsdp_param, group, index, grad in items:
                if (
                    grad is None or not fsdp_param.sharded.requires_grad
                ):  # the latter: frozen since then
                    continue
                if fsdp_param.sharded._backward_hooks:  # they are to get the sum of all forwards
                    before = hooked.get((group, index))
                    hooked[group, index] = grad if before is None else before + grad
                elif fsdp_param.lies_plainly:
                    by_group[group][index] = grad
                else:
                    group.add_gradient(index, grad)
        for group, several in by_group.items():
            group.add_gradients(several)

    def end(self) -> None:
        """The backward of this forward has ended, and all gradients were taken."""
        self.unit.expected.discard(self.first)
        with torch.no_grad():
            self.call().post_backward()


class End(compat.OutsideFunction):
    """The end of a unit's backward, right after its last `Gather`.

    In that node itself autograd still holds the gradients, beside the buffer to which they were
    copied and those of the reduction.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, plain: torch.Tensor) -> torch.Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return plain.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[None, None]:
        ctx.gathered.end()
        return None, None


class Gather(compat.OutsideFunction):
    """See the module's docstring. Transformations of ``torch.func`` do not see it."""

    @staticmethod
    def forward(
        ctx: Any,
        gathered: Gathered,
        place: int,
        nodes: list[weakref.ref[Any]],
        plain: torch.Tensor,
        *shards: torch.Tensor,
    ) -> Any:
        ctx.gathered, ctx.place = gathered, place
        ctx.set_materialize_grads(False)
        nodes.append(weakref.ref(ctx))
        if place:
            compat.run_when_ready(ctx)
        else:
            gathered.unit.ends.add(ctx)
            gathered.first = id(ctx)
        # They have the version counters of what they are views of: so a write to one is seen, and a
        # read after the memory was freed is an error.
        half = gathered.trained.halves[place]
        views = tuple([each.gathered.detach() for each in half.fsdp_params])  # type: ignore[union-attr]
        for group in gathered.unit.groups:
            if group.takes_any_dtype:
                which = [each.takes_any_dtype for each in half.groups]
                compat.take_gradients_as_they_are(ctx, views, which)
                break
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, None, None, *ctx.gathered.take(ctx, ctx.place, grads))


def _averaged(grad: torch.Tensor, fsdp_param: FSDPParam) -> torch.Tensor:
    """Return the average of a gradient over the ranks, sharded as the parameter is. Collective."""
    sharded = cast(DTensor, fsdp_param.sharded)
    mean = [Partial("avg")] * sharded.device_mesh.ndim
    if isinstance(grad, DTensor):  # the loss has a penalty on shards, too
        grad = grad.full_tensor()
    is_set, dtype = fsdp_param.grad_dtype
    grad = grad.to(dtype or grad.dtype if is_set else sharded.dtype)
    whole = DTensor.from_local(grad, sharded.device_mesh, mean, run_check=False)
    return fsdp_param.wrap(local_of(redistribute(whole, placements=sharded.placements)))
