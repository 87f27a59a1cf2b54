"""What `flatten_` steps on: states of many parameters in flat tensors, and pieces of shards.

A **space** has the states of many parameters, one flat tensor for each name. Two parameters w and
b of which this rank holds 5 and 2 elements, in AdamW::

    member                 w           b
    exp_avg        | w w w w w | b b |         one tensor, `elements`
    step           | w | b |                   one number for each member, `scalars`

``optimizer.state[w]["exp_avg"]`` is a RaggedTensor around the first five elements, and
``optimizer.state[w]["step"]`` is the first number: whoever reads or writes the states of one
parameter sees what a plain optimizer has. There are no gaps, whatever lies between w and b in
their shard::

    parameters in their shard    | w w w w | b b b b | . . | u u u |      `.` is not ours
    gradients in theirs          | w w w w | b b b b | . . | u u u |
    segments                     |---------0---------|     |---1---|
    states                       | w w w w | b b b b | u u u |

A **segment** is members whose elements follow each other without a gap in the shard, in the memory
of the gradients and in the states. A long segment is a **piece**: flat views of the three, nothing
is copied. Short segments that follow each other in the states are packed into one piece: their
parameters and gradients are copied together, and the parameters back after the step. What lies
between segments is never touched. Segments are found from addresses alone. A member without a
gradient, or one whose `step` differs from that of the one before it, ends a segment and a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.ragged import wrap

States = Mapping[Any, dict[str, Any]]  # of an optimizer, by parameter

# States that are one number for a parameter. All others have the shape of the parameter.
SCALARS = frozenset({"eta", "mu", "mu_product", "step"})

# Making a space copies its states once, one name at a time: at most 64 MiB more for fp32 states,
# or those of one parameter that is larger.
_MAX_ELEMENTS = 2**24

_LOCAL, _SPEC, _DTYPE = attrgetter("_local_tensor"), attrgetter("_spec"), attrgetter("dtype")
_VALUES = methodcaller("values")


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, for what knows nothing of meshes."""
    return tensor._local_tensor


class Member:
    """A parameter with its states, as they were when its space was made.

    Args:
        param: the parameter.
        state: what the optimizer has for it; None if it has nothing, as SGD without momentum.
    """

    __slots__ = (
        *("param", "state", "entries", "local", "numel", "num_bytes"),
        *("space", "index", "start"),
    )

    def __init__(self, param: DTensor, state: dict[str, Any] | None) -> None:
        self.param, self.state = param, state
        self.local = local_of(param)
        self.numel, self.num_bytes = self.local.numel(), self.local.nbytes
        self.entries: list[Any] = []  # the values of ``state``
        self.space = 0  # its place in the list of spaces; the space itself would be a cycle
        self.index = 0  # in the space
        self.start = 0  # of its elements in the space

    def is_intact(self, states: States) -> bool:
        """Whether the optimizer still has these very tensors for it.

        ``load_state_dict`` replaces states, and ``module.to()`` replaces local parts.
        """
        state = self.state
        if states.get(self.param) is not state or local_of(self.param) is not self.local:
            return False
        if state is None:
            return True
        return len(state) == len(self.entries) and all(map(is_, state.values(), self.entries))

    def signature(self) -> tuple[Any, ...]:
        """Names, dtypes and devices; the same for all members of a space."""
        tensors = {"": self.local} | (self.state or {})
        return tuple((name, *_kind(tensor)) for name, tensor in tensors.items())


class Members:
    """Several members, of which it is quick to see that nothing has changed."""

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
        """The local gradients, if these are the members, intact, with gradients cut as they are.

        None also where a closer look would find that what has changed does not matter.
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
    """Flat states of members; making one copies their states and makes them views of it.

    Args:
        members: of one signature, in the order of their addresses.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.grads: list[torch.Tensor | None] = [None] * len(members)  # the local ones, of a step
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
        """Move one state of all members into one tensor."""
        states = [member.state for member in self.members if member.state is not None]
        if name in SCALARS:
            self.scalars[name] = torch.stack([state[name] for state in states])
            for state, number in zip(states, self.scalars[name].unbind(), strict=True):
                state[name] = number
            return
        locals_ = [local_of(state[name]) for state in states]
        flat = self.elements[name] = locals_[0].new_empty(sum(sizes))
        parts = [
            part.view(local.shape) for part, local in zip(flat.split(sizes), locals_, strict=True)
        ]
        torch._foreach_copy_(parts, locals_)
        for state, part in zip(states, parts, strict=True):
            state[name] = wrap(part, state[name]._spec)

    # Scalars. Members next to each other step together while their numbers are the same.

    def _read_scalars(self) -> None:
        values = zip(*(numbers.tolist() for numbers in self.scalars.values()), strict=True)
        rows = list(values) if self.scalars else [()] * len(self.members)
        # Whether a member's numbers differ from those of the one before it.
        self.differs = [True, *(a != b for a, b in pairwise(rows))]
        self._seen = self._version()

    def _version(self) -> int:
        return sum(numbers._version for numbers in self.scalars.values())

    def check_scalars(self) -> None:
        """Compare the numbers again if somebody else has written to them.

        Cost: none, or a copy of them to the host.
        """
        if self._version() != self._seen:
            self._read_scalars()

    def share_scalars(self, ranges: Sequence[tuple[int, int]]) -> None:
        """After a step: in each half-open range of members, the first one's numbers are right."""
        for first, last in ranges:
            if last - first > 1:
                for numbers in self.scalars.values():
                    numbers[first + 1 : last].copy_(numbers[first])
        # Who did not step is now behind its neighbours. That both are the same again is not seen,
        # because it would take a copy to the host.
        stepped = [False] * len(self.members)
        for first, last in ranges:
            stepped[first:last] = [True] * (last - first)
        for index, (before, now) in enumerate(pairwise(stepped), start=1):
            self.differs[index] |= before != now
        self._seen = self._version()


def spaces_of(members: Sequence[Member]) -> list[Space]:
    """Put members into spaces by signature, in the order of their addresses."""
    by_signature: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        by_signature.setdefault(member.signature(), []).append(member)
    chunks: list[list[Member]] = []
    for alike in by_signature.values():
        # Those without elements have no address. They come last, and cut nothing apart.
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
