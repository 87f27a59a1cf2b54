"""Pieces: what an optimizer steps on instead of parameters.

::

    parameters in their shard    | w w w w | b b b b | . . | u u u |      `.` is not ours
    gradients in theirs          | w w w w | b b b b | . . | u u u |
    segments                     |---------0---------|     |---1---|
    states                       | w w w w | b b b b | u u u |

A **segment** is members whose elements follow each other without a gap in the shard, in the memory
of the gradients and in the states. A long segment is a **piece**: flat views of the three, nothing
is copied. Short segments that follow each other in the states are packed into one piece: their
parameters and gradients are copied together, and the parameters back after the step. What lies
between segments is never touched.

Segments are found from addresses alone. A member without a gradient, or one whose `step` differs
from that of the one before it, ends a segment and a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.optim.flat.space import Member, Space

# From here on (elements) kernels of their own cost less than the copies: on a CPU those of AdamW
# cost about 20 us a tensor, and the copies about 2 ns an element.
_LONG = 8192


class Piece:
    """One tensor for an optimizer: its parameter, which has the gradient, and its states.

    Args:
        param: flat, or the local part of the one parameter.
        grad: like ``param``.
        state: what the optimizer's state is for it.
        owners: the parameters that it steps.
        space: of the states; None for a parameter on its own.
        members: the half-open range of members of the space.
        packed: where ``param`` and ``grad`` were copied from, if they were.
        lacks_states: whether torch will put the first ones into ``state``.
    """

    __slots__ = (
        *("param", "state", "owners", "space", "members", "lacks_states"),
        *("_grad", "_packed", "_version"),
    )

    def __init__(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        *,
        owners: list[DTensor],
        space: Space | None = None,
        members: tuple[int, int] = (0, 0),
        packed: _Packed | None = None,
        lacks_states: bool = False,
    ) -> None:
        self.param, self.state, self.owners = param, state, owners
        self.space, self.members, self.lacks_states = space, members, lacks_states
        self._grad, self._packed, self._version = grad, packed, grad._version
        param.grad = grad

    def unpack(self) -> None:
        """Copy a packed parameter back to where it came from, after the step."""
        if self._packed is None:
            return
        params, grads, parts = self._packed
        torch._foreach_copy_(params, parts[: len(params)])
        if self._grad._version != self._version:  # unscaled by a fused kernel, for example
            torch._foreach_copy_(grads, parts[len(params) :])


class _Packed(NamedTuple):
    """Tensors that were copied together."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    parts: tuple[torch.Tensor, ...]  # their copies: of the parameters, then of the gradients


class _Segment(NamedTuple):
    """Members whose elements follow each other; those without elements may come with them."""

    first: int  # of the members of the space
    last: int  # half-open
    numel: int
    local: torch.Tensor  # of the first member
    grad: torch.Tensor

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of all members, from ``local`` or ``grad``."""
        if tensor.dim() == 1 and tensor.numel() == self.numel:
            return tensor
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


def pieces_of(space: Space) -> Iterator[Piece]:
    """The pieces for the members of which ``space.grads`` has a gradient. Forgets the gradients.

    Cost: about a microsecond of host time for each member, and the copies of short segments.
    """
    grads, space.grads = space.grads, [None] * len(space.members)
    space.check_scalars()
    for run in _runs(space, grads):
        short: list[_Segment] = []
        for segment in run:
            if segment.numel < _LONG:
                short.append(segment)
                continue
            if short:
                yield _piece(space, short)
                short = []
            yield _piece(space, [segment])
        if short:
            yield _piece(space, short)


def _runs(space: Space, grads: Sequence[torch.Tensor | None]) -> Iterator[list[_Segment]]:
    """Segments in order; in one list those that follow each other in the states."""
    run: list[_Segment] = []
    part: list[tuple[Member, torch.Tensor]] = []  # the segment that grows
    end = grad_end = 0
    for member, grad, differs in zip(space.members, grads, space.differs, strict=True):
        if grad is None or differs:
            run += _segments(part)
            part = []
            if run:
                yield run
                run = []
            if grad is None:
                continue
        address, grad_address = member.local.data_ptr(), grad.data_ptr()
        if (address != end or grad_address != grad_end) and member.numel:
            run += _segments(part)
            part = []
        part.append((member, grad))
        end, grad_end = address + member.num_bytes, grad_address + member.num_bytes
    run += _segments(part)
    if run:
        yield run


def _segments(part: list[tuple[Member, torch.Tensor]]) -> list[_Segment]:
    """One segment; or one for each member, if they lie in different storages by chance."""
    if not part:
        return []
    member, grad = part[0]
    numel = part[-1][0].start + part[-1][0].numel - member.start
    num_bytes = numel * member.local.element_size()
    if len(part) > 1 and any(_bytes_from(each) < num_bytes for each in (member.local, grad)):
        return [segment for pair in part for segment in _segments([pair])]
    return [_Segment(member.index, member.index + len(part), numel, member.local, grad)]


def _bytes_from(tensor: torch.Tensor) -> int:
    """How many bytes its storage has, from its first element on."""
    storage = tensor.untyped_storage()
    return int(storage.nbytes()) - int(tensor.storage_offset()) * tensor.element_size()


def _piece(space: Space, segments: list[_Segment]) -> Piece:
    """The piece of segments that follow each other in the states."""
    first, last = segments[0].first, segments[-1].last
    start = space.members[first].start
    stop = start + sum(segment.numel for segment in segments)
    state: dict[str, Any] = {name: flat[start:stop] for name, flat in space.elements.items()}
    state |= {name: numbers[first] for name, numbers in space.scalars.items()}
    owners = [member.param for member in space.members[first:last]]
    where: Any = {"owners": owners, "space": space, "members": (first, last)}
    params = [segment.flat(segment.local) for segment in segments]
    grads = [segment.flat(segment.grad) for segment in segments]
    if len(segments) == 1:
        return Piece(params[0].detach(), grads[0], state, **where)
    param, grad = (tensors[0].new_empty(stop - start) for tensors in (params, grads))
    sizes = [segment.numel for segment in segments]
    parts = (*param.split(sizes), *grad.split(sizes))
    torch._foreach_copy_(parts, [*params, *grads])
    return Piece(param, grad, state, packed=_Packed(params, grads, parts), **where)
