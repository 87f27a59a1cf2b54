"""Whole parameters as a stream: a bucket at a time in one collective, the next one under way.

A bucket has consecutive parameters that are sharded over the same ranks. Each rank sends its shards
of them, one after the other and in the dtype that is asked for, in one uneven all-gather. Nothing
is padded. Between two steps of the stream, a rank holds::

    its shards | bucket k, as it arrived | bucket k + 1, under way | the tensor it yielded last
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_fsdp import compat, waiting
from vescale_fsdp.backends import backend_name, collective_device
from vescale_fsdp.dbuffer import Exchange
from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S, agree
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.ragged import (
    Box,
    RaggedShard,
    as_bytes,
    group_along,
    holding_of,
    ragged_axis_of,
)

BUCKET_BYTES = 512 << 20
_ALIGNMENT = 16  # bytes, of what each rank sends

To = Literal["all", "cpu"] | int


def stream_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: To = "all",
    rename: Callable[[str], str | None] | None = None,
    merge: Mapping[str, Sequence[str]] | None = None,
    tied: Literal["once", "each"] = "once",
) -> Iterator[tuple[str, Tensor | None]]:
    """The whole parameters of a sharded model, one after the other. Collective.

    For weights that go to another runtime: an inference engine, an export, an average::

        for name, tensor in vescale_fsdp.stream_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])

    They come in the order of ``model.named_parameters()``, by its names (those of wrappers such as
    ``torch.compile`` removed). Each is a tensor of its own, without gradients, that the caller may
    keep or write to. The model does not change, and nothing of it is unsharded. Values are those of
    the shards: what was written inside of `unsharded` appears after that context.

    All ranks iterate, with the same arguments, and do not step the optimizer meanwhile. They may
    stop early if all of them stop after the same parameter.

    Args:
        model: has parameters sharded by ``fully_shard``, or other DTensors, or plain ones.
        bucket_bytes: of the parameters in one collective, at most; a larger parameter has a
            collective of its own.
        dtype: of the tensors; None: as they are. Parameters are cast before they are sent. Those
            that are not floating-point stay as they are.
        to: ``"all"``: every rank gets the tensors, on the device of the mesh. ``"cpu"``: every rank
            gets them in the memory of the host. A global rank: that one gets them, and the others
            get None in their place; with replicas (HSDP), the other replicas send nothing.
        rename: the name to yield for a parameter's own; None to leave the parameter out.
        merge: parameters to concatenate along dimension 0, by the names of the results, after
            ``rename``. A ``*`` is any text::

                merge={"*.qkv.weight": ["*.q.weight", "*.k.weight", "*.v.weight"]}

            A merged parameter comes in the place of the first of its parts.
        tied: a parameter with several names is yielded under the first one (``"once"``), or under
            each, one after the other, as the same tensor (``"each"``).

    Yields:
        Name and tensor, of the parameter's whole shape.

    Cost:
        One round through the store, and one uneven all-gather a bucket: each rank receives the
        elements of the others, once. To a single rank the others send theirs, and receive nothing.
        Memory beside the shards: two buckets at most, and the tensors that the caller holds. A
        bucket is filled to ``bucket_bytes`` less its largest parameter, to have room for the two
        that exist while one is exchanged for the next.

    Raises:
        ValueError: an argument is not one of the above, ``merge`` names a part that is missing or
            does not fit the others, or two parameters would have one name.
        RuntimeError: a parameter is still on meta.
        RankMismatchError: ranks have different parameters or arguments, or one did not come in
            time.
    """
    _check(bucket_bytes, dtype, to, tied)
    outputs = _outputs(model, dtype, rename, merge or {}, tied)
    buckets = _buckets(outputs, bucket_bytes, to)
    _agree(outputs, bucket_bytes, to)
    return _stream(buckets, to)


def _check(bucket_bytes: int, dtype: torch.dtype | None, to: To, tied: str) -> None:
    """Raise unless the arguments are what `stream_parameters` says."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type or None, got {dtype}")
    size = dist.get_world_size() if dist.is_initialized() else 1
    is_rank = isinstance(to, int) and not isinstance(to, bool)
    if to not in ("all", "cpu") and not (is_rank and 0 <= to < size):  # type: ignore[operator]
        raise ValueError(f'to must be "all", "cpu" or a rank from 0 to {size - 1}, got {to!r}')
    if tied not in ("once", "each"):
        raise ValueError(f'tied must be "once" or "each", got {tied!r}')


def _outputs(
    model: nn.Module,
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] | None,
    merge: Mapping[str, Sequence[str]],
    tied: str,
) -> list[_Output]:
    """The tensors of the stream, in order."""
    sources: dict[int, _Source] = {}  # by the parameter, which may have several names
    found: dict[str, tuple[Sequence[str], dict[int, _Source]]] = {}  # parts of each, and those seen
    for own_name, param in _named_parameters(model):
        name = own_name if rename is None else rename(own_name)
        if name is None:
            continue
        if param.is_meta:
            raise RuntimeError(
                f"{own_name} is on meta; materialize the model before its parameters are streamed"
            )
        is_cast = dtype is not None and param.is_floating_point()
        sent_as = dtype if is_cast and dtype else param.dtype
        source = sources.setdefault(id(param), _Source(own_name, param.detach(), sent_as))
        result, parts, number = _part_of(name, merge)
        expected, seen = found.setdefault(result, (parts, {}))
        first = next(iter(seen.values()), source)
        other = seen.setdefault(number, source if parts == expected else first)
        if other is not source:
            raise ValueError(
                f"{other.name} and {own_name} would both be {result!r}; see rename and merge"
            )
    outputs = [
        _Output([result], _put_together(result, parts, seen))
        for result, (parts, seen) in found.items()
    ]
    return _untied(outputs, tied)


def _untied(outputs: list[_Output], tied: str) -> list[_Output]:
    """Outputs of the same parameters as one, with the first name or all."""
    firsts: dict[tuple[_Source, ...], _Output] = {}
    for output in outputs:
        first = firsts.setdefault(tuple(output.sources), output)
        if first is not output and tied == "each":
            first.names += output.names
    return [*firsts.values()]


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The sharded parameters under all their names, also where a unit is unsharded."""
    slots = [s for unit in units_in(model).values() for group in unit.groups for s in group.slots]
    sharded = {id(slot.gathered): slot.sharded for slot in slots}
    for path, param in model.named_parameters(remove_duplicate=False):
        yield compat.fqn_of(model, path), sharded.get(id(param), param)


def _part_of(name: str, merge: Mapping[str, Sequence[str]]) -> tuple[str, Sequence[str], int]:
    """The result that a parameter is a part of, all its parts, and the number of this one."""
    for result, parts in merge.items():
        for number, part in enumerate(parts):
            found = re.fullmatch(re.escape(part).replace(r"\*", "(.*)"), name)
            if found:
                texts = found.groups()
                return _filled(result, texts), [_filled(each, texts) for each in parts], number
    return name, [name], 0


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """A pattern with texts in the place of each ``*``."""
    left = iter(texts)
    return re.sub(r"\*", lambda _: next(left, "*"), pattern)


def _put_together(result: str, names: Sequence[str], found: Mapping[int, _Source]) -> list[_Source]:
    """The sources of an output, in order, if all are there and fit."""
    missing = [name for number, name in enumerate(names) if number not in found]
    if missing:
        raise ValueError(
            f"{result} is merged from {', '.join(names)}, but {' and '.join(missing)} is no "
            "parameter, or part of another one; see merge"
        )
    first, *others = sources = [found[number] for number in range(len(names))]
    for other in others:
        if not first.shape or other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            raise ValueError(
                f"{other.name} {tuple(other.shape)} {other.dtype} cannot be merged with "
                f"{first.name} {tuple(first.shape)} {first.dtype} into {result}: all dimensions "
                "but the first must be equal, and the dtype"
            )
    return sources


def _buckets(outputs: list[_Output], bucket_bytes: int, to: To) -> list[_Bucket]:
    """Consecutive outputs of one route, up to the bytes that leave room for the largest of them."""
    buckets: list[list[_Output]] = []
    total = largest = 0
    for output in outputs:
        size, largest_then = output.num_bytes, max(largest, output.num_bytes)
        is_new = (
            not buckets
            or output.route != buckets[-1][-1].route
            or total + size + largest_then > bucket_bytes
        )
        if is_new:
            buckets.append([])
            total, largest_then = 0, size
        buckets[-1].append(output)
        total, largest = total + size, largest_then
    return [_Bucket(each, to) for each in buckets]


def _agree(outputs: list[_Output], bucket_bytes: int, to: To) -> None:
    """Raise unless the ranks that share parameters stream the same ones, in the same way."""
    params = [source.param for output in outputs for source in output.sources]
    meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
    widest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if widest is None:
        return
    entries = [f"bucket_bytes={bucket_bytes}, to={to!r}"]
    for output in outputs:
        parts = [f"{each.name} {tuple(each.shape)} {each.dtype}" for each in output.sources]
        entries.append(f"{', '.join(output.names)}: {', '.join(parts)}")
    ranks = sorted(widest.mesh.flatten().tolist())
    advice = "All ranks call stream_parameters on the same model, with the same arguments."
    agree("parameters to stream", entries, ranks, advice, timeout_s=LONG_TIMEOUT_S)


def _stream(buckets: list[_Bucket], to: To) -> Iterator[tuple[str, Tensor | None]]:
    ahead: _Bucket | None = None
    try:
        for bucket, following in pairwise([None, *buckets, None]):
            if bucket is not None:
                bucket.wait()
            ahead = following
            if following is not None:
                following.start()
            if bucket is not None:
                yield from bucket.tensors(to)
    finally:
        if ahead is not None:  # the caller has left: what is under way still needs its memory
            ahead.wait()


@dataclass(eq=False)
class _Source:
    """A parameter, and what each rank that shares it has of it."""

    name: str
    param: Tensor  # without gradients; a DTensor, or plain
    dtype: torch.dtype  # to send
    parts: list[list[Box]] = field(default_factory=list)  # by the rank of the group that has them

    @cached_property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.param.shape

    @cached_property
    def num_bytes(self) -> int:
        """Of the whole, as it is sent."""
        return self.shape.numel() * self.dtype.itemsize

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Of its mesh, over which it is sharded."""
        if not isinstance(self.param, DTensor) or not self.shape.numel():
            return ()
        each = enumerate(self.param.placements)
        return tuple(axis for axis, placement in each if not placement.is_replicate())

    @cached_property
    def route(self) -> object:
        """What parameters have in common that may share a collective; None: it needs none."""
        if not isinstance(self.param, DTensor):
            return None
        is_plain = type(compat.local_tensor(self.param)) is Tensor
        for placement in self.param.placements:
            known = isinstance(placement, RaggedShard | Replicate) or type(placement) is Shard
            is_plain = is_plain and known
        if not is_plain:
            return self  # alone, by its own ``full_tensor``
        return (self.param.device_mesh, self.axes) if self.axes else None

    @cached_property
    def is_flat(self) -> bool:
        """Whether each rank has a range of the flattened parameter."""
        if not isinstance(self.param, DTensor):
            return False
        ragged = ragged_axis_of(self.param.placements)
        return ragged is not None and self.axes == (ragged,)

    def lay_out(self, members: Sequence[tuple[int, ...]]) -> None:
        """Find the parts of the ranks at these coordinates of the mesh."""
        param = self.param
        assert isinstance(param, DTensor)
        if self.is_flat:
            (axis,) = self.axes
            placement = param.placements[axis]
            assert isinstance(placement, RaggedShard)
            ranges = [placement.local_range(self.shape, member[axis]) for member in members]
            self.parts = [[Box((start,), (stop - start,), 0)] for start, stop in ranges]
        else:
            shape, placements = param.device_mesh.shape, param.placements
            self.parts = [holding_of(self.shape, placements, shape, each).boxes for each in members]

    def places(self, whole: Tensor, rank: int) -> list[Tensor]:
        """The views of a rank's part in the whole tensor."""
        target = whole.view(-1) if self.is_flat else whole
        return [box.of(target) for box in self.parts[rank]]

    def own(self, device: torch.device) -> Tensor:
        """The elements of this rank, flat, on the device and in the dtype to send."""
        local = compat.local_tensor(self.param) if isinstance(self.param, DTensor) else self.param
        return local.reshape(-1).to(device, self.dtype)

    def num_bytes_of(self, rank: int) -> int:
        """What a rank of the group sends."""
        return sum(math.prod(box.sizes) for box in self.parts[rank]) * self.dtype.itemsize


@dataclass(eq=False)
class _Output:
    """A tensor of the stream: one parameter, or several that are concatenated along dimension 0."""

    names: list[str]
    sources: list[_Source]

    @cached_property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        first, *others = (source.shape for source in self.sources)
        if not others:
            return first
        return torch.Size([first[0] + sum(shape[0] for shape in others), *first[1:]])

    @cached_property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return sum(source.num_bytes for source in self.sources)

    @cached_property
    def route(self) -> object:
        """As of `_Source`; self if its parameters cannot share a collective."""
        routes = {source.route for source in self.sources}
        return routes.pop() if len(routes) == 1 else self

    @cached_property
    def is_alone(self) -> bool:
        """Whether it is made by ``full_tensor`` of each parameter."""
        return isinstance(self.route, _Source | _Output)


class _Bucket:
    """Outputs whose parameters are sent in one collective.

    Memory: none before `start`. From then on what all ranks send, until the last tensor is taken.
    """

    def __init__(self, outputs: list[_Output], to: To) -> None:
        self.outputs = outputs
        self._receiver = to if isinstance(to, int) and dist.is_initialized() else None
        self._work: Any = None
        self._parts: list[Tensor] = []  # bytes, by the rank of the group that sent them
        self._starts: dict[_Source, list[int]] = {}  # in each part
        self._whole: Tensor | None = None  # the only output, if it can be received in place

    @property
    def is_receiver(self) -> bool:
        """Whether this rank gets the tensors."""
        return self._receiver is None or self._receiver == dist.get_rank()

    @torch.no_grad()
    def start(self) -> None:
        """Issue the collective. Does not wait."""
        found = (source for output in self.outputs for source in output.sources if source.axes)
        sources = [*dict.fromkeys(found)]
        if not sources or self.outputs[0].is_alone:
            return
        # Wide dtypes first, so that each part begins where its dtype may.
        sources.sort(key=lambda source: -source.dtype.itemsize)
        spec = sources[0].param._spec  # type: ignore[attr-defined]
        group, members = group_along(spec, sources[0].axes)
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if self._receiver is not None and self._receiver not in ranks:
            return  # another replica's
        sizes = [0] * len(members)
        for source in sources:
            source.lay_out(members)
            self._starts[source] = list(sizes)
            sizes = [size + source.num_bytes_of(k) for k, size in enumerate(sizes)]
        local = compat.local_tensor(sources[0].param)
        device = collective_device(group, local.device)
        if self.is_receiver:
            self._parts = self._memory(sources, sizes, device)
            mine = self._parts[rank]
        else:
            mine = torch.empty(sizes[rank], dtype=torch.uint8, device=device)
        for source in sources:
            begin = self._starts[source][rank]
            part = mine[begin : begin + source.num_bytes_of(rank)]
            part.view(source.dtype).copy_(source.own(device))
        if self._receiver is None:
            self._work = _all_gather(self._parts, mine, group)
        else:
            self._work = _gather(self._parts, mine, ranks.index(self._receiver), group)

    def _memory(
        self, sources: list[_Source], sizes: list[int], device: torch.device
    ) -> list[Tensor]:
        """Where the parts of all ranks arrive."""
        first = sources[0]
        if len(self.outputs) == len(self.outputs[0].sources) == 1 and first.is_flat:
            self._whole = torch.empty(first.shape, dtype=first.dtype, device=device)
            return [as_bytes(first.places(self._whole, rank)[0]) for rank in range(len(sizes))]
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        parts = torch.empty(sum(aligned), dtype=torch.uint8, device=device).split(aligned)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def wait(self) -> None:
        """Wait for the collective."""
        work, self._work = self._work, None
        if work is not None:
            with waiting.Named("the parameters of stream_parameters"):
                work.wait()

    def tensors(self, to: To) -> Iterator[tuple[str, Tensor | None]]:
        """What the stream yields."""
        for output in self.outputs:
            tensor = self._tensor(output)
            if tensor is not None and to == "cpu":
                tensor = tensor.cpu()
            for name in output.names:
                yield name, tensor
            del tensor  # the next one is made while the caller still holds this one
        self._parts, self._starts = [], {}

    @torch.no_grad()
    def _tensor(self, output: _Output) -> Tensor | None:
        if output.is_alone:
            wholes = [_full(source) for source in output.sources]
            return torch.cat(wholes) if self.is_receiver else None
        if not self.is_receiver:
            return None
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        first = output.sources[0]
        device = self._parts[0].device if self._parts else first.param.device
        whole = torch.empty(output.shape, dtype=first.dtype, device=device)
        rows = [source.shape[0] if source.shape else 1 for source in output.sources]
        places = whole.split(rows) if len(rows) > 1 else [whole]
        for place, source in zip(places, output.sources, strict=True):
            self._fill(place, source)
        return whole

    def _fill(self, place: Tensor, source: _Source) -> None:
        if source not in self._starts:  # this rank has all of it
            place.copy_(source.own(place.device).view(source.shape))
            return
        starts = self._starts[source]
        for rank, (start, part) in enumerate(zip(starts, self._parts, strict=True)):
            values = part[start : start + source.num_bytes_of(rank)].view(source.dtype)
            for box, view in zip(source.parts[rank], source.places(place, rank), strict=True):
                view.copy_(box.in_local(values))


def _full(source: _Source) -> Tensor:
    """The whole parameter, by a collective of its own."""
    full = source.param.full_tensor() if isinstance(source.param, DTensor) else source.param
    return full.to(source.dtype)


def _all_gather(parts: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to send what this rank has to all, and to receive what they have."""
    if len(parts) == 1:
        return None
    if backend_name(group, mine.device) == "gloo":
        return Exchange([mine] * len(parts), parts, dist.get_rank(group), group)
    return compat.all_gather_uneven(parts, mine, group)


def _gather(parts: list[Tensor], mine: Tensor, receiver: int, group: dist.ProcessGroup) -> Any:
    """Start to send what this rank has to one rank, or on that rank to receive it."""
    size, rank, nothing = dist.get_world_size(group), dist.get_rank(group), mine[:0]
    if size == 1:
        return None
    if backend_name(group, mine.device) == "gloo":
        sent = [mine if rank != receiver == peer else nothing for peer in range(size)]
        return Exchange(sent, parts or [nothing] * size, rank, group)
    return compat.gather_uneven(parts, mine, receiver, group)
