"""Backwards by sharded parameters: ``loss.backward(inputs=...)`` and ``torch.autograd.grad``.

The graph of a forward has the unsharded parameters, but users have the sharded ones. So a backward
by a sharded parameter is one by its unsharded twin too. One of both is in the graph: the parameter
itself only in terms that are computed from shards, such as a penalty.

Such a backward may come to no unit on a rank that has left the units of these parameters out, and
to some on others. If the outputs come from the model, this rank takes part all the same, as in a
backward without inputs, which comes to the outputs of the model at least.

``torch.autograd.grad``, and a backward by other tensors alone (positions of atoms), accumulate no
gradient of a parameter. So none is reduced, and no hook on a parameter runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor, Partial

from vescale_fsdp.engine.boundary import Model, models_behind
from vescale_fsdp.engine.slot import Slot, holder_of, is_unsharded, local_of, slot_of

Run = Callable[[Sequence[Any], bool], Any]


def run_backward(
    run: Run,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    *,
    accumulates: bool,
    allows_unused: bool,
    makes_graph: bool,
) -> Any:
    """Run a backward by ``inputs``. `compat.replace_backward` lets torch call it.

    ``torch.autograd.grad`` returns the average over the ranks, sharded as the parameter is, which
    is what one process has for the global batch. Collective then: a reduction for each parameter.

    Args:
        run: runs it by other inputs, and may allow that some are not used.
        outputs: the tensors that are differentiated, or edges of the graph.
        accumulates: into ``.grad``, as ``backward`` does.
        allows_unused: returns None for what is not used; else an error.
        makes_graph: of the gradients (``create_graph``).

    Raises:
        NotImplementedError: there is to be a graph of gradients by sharded parameters; or the
            outputs depend on a parameter in both ways, or it is also sharded by an inner
            parallelism.
        RuntimeError: an input is not used, on any rank.
    """
    slots = [holder_of(each) if isinstance(each, DTensor) else None for each in inputs]
    twins = {
        place: slot.gathered
        for place, slot in enumerate(slots)
        if slot is not None and slot.gathered is not None and slot.gathered.requires_grad
    }
    accumulates_any = accumulates and (not inputs or twins or any(map(_is_gathered, inputs)))
    by_twins = twins and not accumulates
    with _telling(leaves_out=not accumulates_any) as begun:
        found = run([*inputs, *twins.values()], True if by_twins else allows_unused)
        _pass_over(outputs, inputs, begun)
    if not by_twins:
        return found
    results = list(found)
    of_twins = dict(zip(twins, results[len(inputs) :], strict=True))
    del results[len(inputs) :]
    used = [place for place, is_used in _used_on_any_rank(of_twins, slots).items() if is_used]
    if used and makes_graph:
        refuse_graph(cast(Slot, slots[used[0]]))
    _refuse(results, of_twins, slots)
    for place in used:
        results[place] = _averaged(of_twins[place], cast(Slot, slots[place]))
    if not allows_unused and any(each is None for each in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(results)


def _pass_over(outputs: Sequence[Any], inputs: Sequence[Any], begun: list[Model]) -> None:
    """Take part for the models with a parameter among ``inputs`` of which no node has run."""
    found = [slot_of(each) for each in inputs if isinstance(each, torch.Tensor)]
    named = {id(slot) for slot in found if slot is not None}
    named.difference_update(id(slot) for model in begun for slot in model.slots())
    for model in models_behind(outputs) if named else ():
        if not named.isdisjoint(id(slot) for slot in model.slots()):
            model.pass_over_backward()


_leaves_out = False  # of the innermost backward that runs
_begun: list[Model] | None = None  # that had a part in it


def leaves_out_parameters() -> bool:
    """Whether a backward runs that accumulates no gradient of a parameter."""
    return _leaves_out


def note_begun(model: Model) -> None:
    """Note that a backward has come to a model."""
    if _begun is not None:
        _begun.append(model)


@contextmanager
def _telling(leaves_out: bool) -> Iterator[list[Model]]:
    global _leaves_out, _begun
    before, _leaves_out = (_leaves_out, _begun), leaves_out
    begun: list[Model] = []
    _begun = begun
    try:
        yield begun
    finally:
        _leaves_out, _begun = before


def _is_gathered(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and is_unsharded(tensor)


def refuse_graph(slot: Slot) -> NoReturn:
    """Refuse ``create_graph=True`` for gradients by a sharded parameter."""
    raise NotImplementedError(
        f"create_graph=True for the gradient by {slot.fqn!r}: vescale_fsdp averages and shards "
        "gradients by parameters, without a graph. Gradients by inputs can have one: "
        "torch.autograd.grad(loss, inputs, create_graph=True)"
    )


def _refuse(
    results: Sequence[torch.Tensor | None],
    of_twins: dict[int, torch.Tensor | None],
    slots: Sequence[Slot | None],
) -> None:
    for place, grad in of_twins.items():
        slot = cast(Slot, slots[place])
        if grad is not None and results[place] is not None:
            raise NotImplementedError(
                f"torch.autograd.grad by {slot.fqn!r} of something that depends on it both through "
                "a forward and directly (a penalty); differentiate the terms one after the other"
            )
        if grad is not None and (slot.given or slot.inner) is not None:
            raise NotImplementedError(
                f"torch.autograd.grad by {slot.fqn!r}, which is sharded by an inner parallelism "
                "too; use backward()"
            )


def _used_on_any_rank(
    of_twins: dict[int, torch.Tensor | None], slots: Sequence[Slot | None]
) -> dict[int, bool]:
    """Whether any rank has a gradient, so that all take part in its reduction."""
    used: dict[int, bool] = {}
    by_mesh: dict[Any, list[int]] = {}
    for place in of_twins:
        by_mesh.setdefault(cast(Slot, slots[place]).spec.mesh, []).append(place)
    for mesh, places in by_mesh.items():
        flags = torch.tensor([of_twins[place] is not None for place in places]).int()
        most = [Partial("max")] * mesh.ndim
        anywhere = DTensor.from_local(flags.to(mesh.device_type), mesh, most, run_check=False)
        used.update(zip(places, anywhere.full_tensor().bool().tolist(), strict=True))
    return used


def _averaged(grad: torch.Tensor | None, slot: Slot) -> torch.Tensor:
    sharded = cast(DTensor, slot.sharded)
    if grad is None:  # here; another rank has one
        assert slot.gathered is not None, "the twin was an input"
        grad = torch.zeros_like(slot.gathered)
    mean = [Partial("avg")] * sharded.device_mesh.ndim
    whole = DTensor.from_local(grad.to(sharded.dtype), sharded.device_mesh, mean, run_check=False)
    return slot.wrap(local_of(whole.redistribute(placements=sharded.placements)))
