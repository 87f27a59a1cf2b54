"""The data structures of `flatten_`: flat states of many parameters, and pieces of shards.

A **space** holds the states of many parameters, its members: one flat tensor for each state.
Example: this rank has 5 elements of w and 2 of b, and the optimizer is AdamW::

    member                 w           b
    exp_avg        | w w w w w | b b |         one tensor, `elements`
    step           | w | b |                   one number for each member, `scalars`

``optimizer.state[w]["exp_avg"]`` is a RaggedTensor that is a view of the first five elements, and
``optimizer.state[w]["step"]`` is a view of the first number. So the states of one parameter look as
in a plain optimizer. A space has no gaps, even if there are some between w and b in the shard::

    parameters in the shard      | w w w w | b b b b | . . | u u u |      `.`: other elements
    their gradients              | w w w w | b b b b | . . | u u u |
    segments                     |---------0---------|     |---1---|
    states                       | w w w w | b b b b | u u u |

A **segment** is a run of members whose elements follow each other without a gap in the shard, in
the gradients and in the states. The optimizer steps on **pieces**, one tensor each. A long segment
is a piece: flat views of the three, without copies. Short segments that follow each other in the
states are packed into one piece: their parameters and gradients are copied together, and the
parameters are copied back after the step. Elements between segments are never changed. Segments are
found by addresses only. A member without a gradient, or one whose `step` differs from that of the
member before it, ends a segment and a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.ragged import wrap

States = Mapping[Any, dict[str, Any]]  # ``optimizer.state``

# States with one number for each parameter. All others have the parameter's shape.
SCALARS = frozenset({"eta", "mu", "mu_product", "step"})

# A new space copies its states once, one state at a time. With this limit the copy takes at most 64
# MiB for fp32 states, or the size of one larger parameter.
_MAX_ELEMENTS = 2**24

_LOCAL, _SPEC, _DTYPE = attrgetter("_local_tensor"), attrgetter("_spec"), attrgetter("dtype")
_VALUES = methodcaller("values")


class Member:
    """A parameter with its states at the time when its space was made.

    Args:
        param: the parameter.
        state: its entry in ``optimizer.state``. None: it has none, as in SGD without momentum.
    """

    __slots__ = (
        *("param", "state", "entries", "local", "numel", "num_bytes"),
        *("space", "index", "start"),
    )

    def __init__(self, param: DTensor, state: dict[str, Any] | None) -> None:
        self.param, self.state = param, state
        self.local = param._local_tensor
        self.numel, self.num_bytes = self.local.numel(), self.local.nbytes
        self.entries: list[Any] = []  # the values of ``state``
        self.space = 0  # index in the list of spaces (a reference would be a cycle)
        self.index = 0  # index in the space
        self.start = 0  # its first element in the space

    def is_intact(self, states: States) -> bool:
        """Whether the optimizer still has the same tensors for it.

        ``load_state_dict`` replaces states, and ``module.to()`` replaces local parts.
        """
        state = self.state
        if states.get(self.param) is not state or self.param._local_tensor is not self.local:
            return False
        if state is None:
            return True
        return len(state) == len(self.entries) and all(map(is_, state.values(), self.entries))

    def signature(self) -> tuple[Any, ...]:
        """Return names, dtypes and devices of its tensors. Members of a space have the same."""
        tensors = {"": self.local} | (self.state or {})
        return tuple((name, *_kind(tensor)) for name, tensor in tensors.items())


class Members:
    """Several members, with a fast check that nothing has changed."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._params = [member.param for member in members]
        self._locals = [member.local for member in members]
        self._specs = [member.param._spec for member in members]
        self._dtypes = [member.local.dtype for member in members]
        self._types = {type(member.param) for member in members}
        self._states = [member.state for member in members]
        self._dicts = [state for state in self._states if state is not None]
        self._entries = [entry for member in members for entry in member.entries]

    def parts_if_intact(
        self, params: list[DTensor], grads: list[torch.Tensor], states: States
    ) -> list[torch.Tensor] | None:
        """Return the local gradients if the members have not changed, else None.

        The parameters must be these members in this order, with intact states and with gradients
        that are sharded as they are. The check is strict: it may return None after a change that
        does not matter.
        """
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return None
        if sum(map(len, self._dicts)) != len(self._entries):
            return None
        if not {type(grad) for grad in grads} <= self._types:
            return None
        parts = list(map(_LOCAL, grads))
        are_same = (
            map(is_, map(_LOCAL, params), self._locals),
            map(is_, map(_SPEC, grads), self._specs),
            map(is_, map(type, parts), repeat(torch.Tensor)),
            map(is_, map(_DTYPE, parts), self._dtypes),
            map(is_, map(states.get, params), self._states),
            map(is_, chain.from_iterable(map(_VALUES, self._dicts)), self._entries),
        )
        return parts if all(map(all, are_same)) else None


class Space:
    """Flat states of members. The constructor copies their states, and makes them views.

    Args:
        members: all have the same signature. They are sorted by address.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.grads: list[torch.Tensor | None] = [None] * len(members)  # local gradients of a step
        self.elements: dict[str, torch.Tensor] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        sizes = [member.numel for member in members]
        for index, start in enumerate(accumulate(sizes[:-1], initial=0)):
            member = members[index]
            member.index, member.start = index, start
        for name, value in (members[0].state or {}).items():
            if value is not None:
                self._take(name, sizes)
        for member in members:
            member.entries = list((member.state or {}).values())
        self._read_scalars()

    def _take(self, name: str, sizes: list[int]) -> None:
        """Move one state of all members into a flat tensor."""
        states = [member.state for member in self.members if member.state is not None]
        if name in SCALARS:
            self.scalars[name] = torch.stack([state[name] for state in states])
            for state, number in zip(states, self.scalars[name].unbind(), strict=True):
                state[name] = number
            return
        locals_ = [state[name]._local_tensor for state in states]
        flat = self.elements[name] = locals_[0].new_empty(sum(sizes))
        parts = [
            part.view(local.shape) for part, local in zip(flat.split(sizes), locals_, strict=True)
        ]
        torch._foreach_copy_(parts, locals_)
        for state, part in zip(states, parts, strict=True):
            state[name] = wrap(part, state[name]._spec)

    # Scalars. Adjacent members step together as long as their scalars are equal.

    def _read_scalars(self) -> None:
        values = zip(*(numbers.tolist() for numbers in self.scalars.values()), strict=True)
        rows = list(values) if self.scalars else [()] * len(self.members)
        # Whether a member's scalars differ from those of the member before it.
        self.differs = [True, *(a != b for a, b in pairwise(rows))]
        self._seen = self._version()

    def _version(self) -> int:
        return sum(numbers._version for numbers in self.scalars.values())

    def check_scalars(self) -> None:
        """Compare the scalars again if other code has written to them.

        Cost: none, or a copy of the scalars to the host.
        """
        if self._version() != self._seen:
            self._read_scalars()

    def share_scalars(self, ranges: Sequence[tuple[int, int]]) -> None:
        """After a step: in each half-open range copy the first member's scalars to the others."""
        for first, last in ranges:
            if last - first > 1:
                for numbers in self.scalars.values():
                    numbers[first + 1 : last].copy_(numbers[first])
        # A member that did not step now differs from its neighbours. If they become equal later,
        # this is not detected, because it would need a copy to the host.
        stepped = [False] * len(self.members)
        for first, last in ranges:
            stepped[first:last] = [True] * (last - first)
        for index, (before, now) in enumerate(pairwise(stepped), start=1):
            self.differs[index] |= before != now
        self._seen = self._version()


def spaces_of(members: Sequence[Member]) -> list[Space]:
    """Make spaces of members, by signature and in the order of their addresses."""
    by_signature: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        by_signature.setdefault(member.signature(), []).append(member)
    chunks: list[list[Member]] = []
    for alike in by_signature.values():
        # Members without elements have no address. They come last, so that they split no segment.
        alike.sort(key=lambda member: (not member.numel, member.local.data_ptr()))
        chunks.append([])
        num_elements = 0
        for member in alike:
            num_elements += member.numel
            if chunks[-1] and num_elements > _MAX_ELEMENTS:
                chunks.append([])
                num_elements = member.numel
            chunks[-1].append(member)
            member.space = len(chunks) - 1
    return [Space(chunk) for chunk in chunks]


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device)


# Segments with at least this many elements are not packed, because separate kernels cost less than
# the copies: on a CPU AdamW's cost about 20 us a tensor, and the copies about 2 ns an element.
_LONG = 8192


class Piece:
    """One tensor that the optimizer steps on, with its gradient and states.

    Args:
        param: a flat tensor, or the local part of a single parameter.
        grad: its gradient, of the same shape.
        state: its states.
        owners: the parameters that it contains.
        space: has the states. None: the piece is a single parameter.
        members: the half-open range of members of the space.
        packed: the tensors that ``param`` and ``grad`` were copied from, if any.
        lacks_states: whether torch will make the states in this step.
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
        """After the step, copy a packed parameter back to its parameters."""
        if self._packed is None:
            return
        params, grads, parts = self._packed
        torch._foreach_copy_(params, parts[: len(params)])
        if self._grad._version != self._version:  # a fused kernel may have unscaled it
            torch._foreach_copy_(grads, parts[len(params) :])


class _Packed(NamedTuple):
    """Tensors that were copied together."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    parts: tuple[torch.Tensor, ...]  # copies of the parameters, then of the gradients


class _Segment(NamedTuple):
    """Members whose elements follow each other. Members without elements may be among them."""

    first: int  # index of the first member in the space
    last: int  # index after the last one
    numel: int
    local: torch.Tensor  # of the first member
    grad: torch.Tensor

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of all members as a flat view of ``local`` or ``grad``."""
        if tensor.dim() == 1 and tensor.numel() == self.numel:
            return tensor
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


def pieces_of(space: Space) -> Iterator[Piece]:
    """Yield the pieces for the members with a gradient in ``space.grads``. Clears the gradients.

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
    """Yield lists of segments that follow each other in the states, in order."""
    run: list[_Segment] = []
    part: list[tuple[Member, torch.Tensor]] = []  # members of the current segment
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
    """Return one segment; or one for each member, if adjacent members have different storages."""
    if not part:
        return []
    member, grad = part[0]
    numel = part[-1][0].start + part[-1][0].numel - member.start
    num_bytes = numel * member.local.element_size()
    if len(part) > 1 and any(_bytes_from(each) < num_bytes for each in (member.local, grad)):
        return [segment for pair in part for segment in _segments([pair])]
    return [_Segment(member.index, member.index + len(part), numel, member.local, grad)]


def _bytes_from(tensor: torch.Tensor) -> int:
    """Return the bytes of its storage from its first element on."""
    storage = tensor.untyped_storage()
    return int(storage.nbytes()) - int(tensor.storage_offset()) * tensor.element_size()


def _piece(space: Space, segments: list[_Segment]) -> Piece:
    """Make a piece of segments that follow each other in the states."""
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
