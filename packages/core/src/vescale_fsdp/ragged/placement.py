"""RaggedShard: each rank holds any number of whole units of a tensor's contiguous storage.

A worked example, a tensor of shape (6, 4) over four ranks, rows as units::

    RaggedShard(dims=(0,), local_units=(1, 0, 3, 2))

    storage   | row 0 | row 1   row 2   row 3 | row 4   row 5 |
    holder      rank 0          rank 2              rank 3        (rank 1 holds nothing)

The unit is ``numel / sum(local_units)`` = 24 / 6 = 4 elements, one row. Rank 2 holds the flat
range [4, 16). The placement is stored as runs of equal counts, ``((1, 1), (1, 0), (1, 3),
(1, 2))`` here, so that a tensor in the middle of 10,000 ranks costs a handful of integers.

On a mesh of several axes the RaggedShard is applied last: it divides what the ``Shard`` placements
of the other axes leave. DTensor reads placements from left to right, so a ``Shard`` to the left of
the RaggedShard needs nothing, and neither does one to the right whose dimension the units do not
divide: the two commute. A ``Shard`` to the right on a dimension of ``dims`` has already split it,
and ``split_factor`` records into how many parts, as torch's strided shard does.
Tensor parallelism over two ranks first, then rows (2, 1) over three::

    mesh (data 3, tensor 2)     [RaggedShard((0,), (2, 1, 0), split_factor=2), Shard(0)]

    rows of (6, 4)              0 1 | 2 | 3 4 | 5         tensor rank 0 has rows 0-2,
    held by (data, tensor)      0,0  1,0  0,1  1,1        tensor rank 1 has rows 3-5

Where the ``Shard`` placements leave parts of different sizes, one number of units cannot divide
all of them at places that a buffer allows. Then `elements_per_unit` is fixed: units count from the
start of each part, together they are the largest part, and in a smaller one the last units have
fewer elements, or none. 9 rows of 2 elements over two tensor ranks, 5 and 4 rows::

    mesh (data 2, tensor 2)     [RaggedShard((0, 1), (3, 2), split_factor=2, elements_per_unit=2),
                                 Shard(0)]

    rows of (9, 2)              0 1 2 | 3 4 | 5 6 7 | 8   tensor rank 0 has rows 0-4,
    held by (data, tensor)      0,0     1,0   0,1     1,1 tensor rank 1 has rows 5-8

Source: arXiv 2602.22437, section on RaggedShard; canonical units are ours (the same cut must
be the same placement, whatever common factor it was written with).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NoReturn

from torch.distributed.tensor.placement_types import Placement

# (number of consecutive ranks, units that each of them holds)
_Run = tuple[int, int]


class RaggedShard(Placement):
    """Rank k holds ``local_units[k]`` consecutive units of the flat storage, in rank order.

    Args:
        dims: the dimensions that the units divide, a prefix ``(0, 1, ...)`` of the tensor's.
            ``()`` means that the whole tensor is one unit.
        local_units: units per rank along the mesh axis, zeros allowed. They are divided by
            their greatest common divisor: ``(2, 4)`` and ``(1, 2)`` are the same placement.
        split_factor: the number of parts into which axes to the right of this one have already
            split a dimension of ``dims`` (see the module's docstring); 1 if none has.
        elements_per_unit: fixed, where other axes leave parts of different sizes (see there). None:
            the elements of a part, divided by the units.

    The units show where the tensor is split, not its granularity: 10 elements in
    blocks of 4 may be split as (8, 2), which is (4, 1) in units of 2. Code that depends on
    blocks checks the offsets of the split (`local_range`), never the units.

    A RaggedShard is never equal to a ``Shard``, even if both give each rank the same elements.
    """

    dims: tuple[int, ...]
    split_factor: int
    elements_per_unit: int | None
    _runs: tuple[_Run, ...]

    def __init__(
        self,
        dims: Sequence[int],
        local_units: Sequence[int],
        *,
        split_factor: int = 1,
        elements_per_unit: int | None = None,
    ) -> None:
        runs = [(len(list(ranks)), units) for units, ranks in groupby(local_units)]
        self._set(dims, runs, split_factor, elements_per_unit)

    def _set(
        self,
        dims: Sequence[int],
        runs: Iterable[_Run],
        split_factor: int,
        elements_per_unit: int | None,
    ) -> None:
        super().__init__()
        dims = tuple(dims)
        if split_factor < 1:
            raise ValueError(f"RaggedShard.split_factor must be at least 1, got {split_factor}")
        if elements_per_unit is not None and elements_per_unit < 1:
            raise ValueError(
                f"RaggedShard.elements_per_unit must be at least 1, got {elements_per_unit}"
            )
        if dims != tuple(range(len(dims))):
            raise ValueError(
                f"RaggedShard.dims must be a prefix (0, 1, ...) of the dimensions, got {dims}"
            )
        merged: list[_Run] = []
        for count, units in runs:
            if units < 0:
                raise ValueError(f"RaggedShard.local_units must not be negative, got {units}")
            if count and merged and merged[-1][1] == units:
                merged[-1] = (merged[-1][0] + count, units)
            elif count:
                merged.append((count, units))
        if not merged:
            raise ValueError("RaggedShard.local_units must name at least one rank, got none")
        divisor = math.gcd(*(units for _, units in merged)) or 1
        self.dims = dims
        self.split_factor = split_factor
        self.elements_per_unit = elements_per_unit and elements_per_unit * divisor
        self._runs = tuple((count, units // divisor) for count, units in merged)

    @classmethod
    def owner(cls, rank: int, num_shards: int) -> RaggedShard:
        """The placement with the whole tensor on one rank of the axis, for matrix optimizers."""
        if not 0 <= rank < num_shards:
            raise ValueError(f"owner rank must be in [0, {num_shards}), got {rank}")
        return cls._from_runs((), ((rank, 0), (1, 1), (num_shards - rank - 1, 0)))

    @classmethod
    def from_interval(
        cls, start: int, shard_size: int, num_shards: int, shape: Sequence[int]
    ) -> RaggedShard:
        """The placement of a tensor at ``start`` in a buffer of equal shards.

        Args:
            start: first element of the tensor in the buffer.
            shard_size: elements per rank. Rank k holds buffer range [k*S, (k+1)*S).
            num_shards: ranks along the axis.
            shape: of the tensor; decides how few dimensions express the cuts.

        Costs O(1) time and memory, for any number of ranks.

        Raises:
            ValueError: the tensor does not fit in the buffer.
        """
        numel = math.prod(shape)
        stop = start + numel
        if start < 0 or stop > shard_size * num_shards:
            raise ValueError(
                f"a tensor of {numel} elements at {start} does not fit in a buffer of {num_shards} "
                f"shards of {shard_size} elements; pass the offset and shard size of its layout"
            )
        if numel == 0:
            return cls._from_runs((), ((num_shards, 0),))
        first, last = start // shard_size, (stop - 1) // shard_size
        if first == last:
            return cls.owner(first, num_shards)
        head, tail = (first + 1) * shard_size - start, stop - last * shard_size
        runs = (
            (first, 0),
            (1, head),
            (last - first - 1, shard_size),
            (1, tail),
            (num_shards - last - 1, 0),
        )
        return cls.from_runs_of_elements(runs, shape)

    @classmethod
    def from_runs_of_elements(cls, runs: Iterable[_Run], shape: Sequence[int]) -> RaggedShard:
        """The placement with the given numbers of elements of a tensor of ``shape`` per rank.

        Args:
            runs: ``(number of consecutive ranks, elements that each of them holds)``, in rank
                order; together the elements of the tensor.
            shape: of the tensor; decides how few dimensions express the cuts.
        """
        runs = tuple(runs)
        held = sum(count * elements for count, elements in runs)
        assert held == math.prod(shape), f"{held} elements are given out, of shape {shape}"
        unit = math.gcd(*(elements for count, elements in runs if count))
        trailing, num_dims = held, 0
        while unit and unit % trailing:
            trailing //= shape[num_dims]
            num_dims += 1
        return cls._from_runs(range(num_dims), runs)

    @classmethod
    def _from_runs(
        cls,
        dims: Sequence[int],
        runs: Iterable[_Run],
        split_factor: int = 1,
        elements_per_unit: int | None = None,
    ) -> RaggedShard:
        placement = cls.__new__(cls)
        placement._set(dims, runs, split_factor, elements_per_unit)
        return placement

    def with_split_factor(self, split_factor: int) -> RaggedShard:
        """The same split, if axes to the right have already split a dimension of ``dims``."""
        return RaggedShard._from_runs(self.dims, self._runs, split_factor, self.elements_per_unit)

    def fixed_in(self, largest: Sequence[int]) -> RaggedShard:
        """The same split of a part of shape ``largest``, with `elements_per_unit` fixed by it.

        Smaller parts are split after as many elements. The split may be at any element of them, so
        ``dims`` are all dimensions. A part that is whole on one rank has no split to fix.
        """
        if not self.dims:
            return self
        dims, unit = range(len(largest)), self.unit_numel(largest)
        return RaggedShard._from_runs(dims, self._runs, self.split_factor, unit)

    def cuts_like(self, other: RaggedShard) -> bool:
        """Whether both split a tensor at the same places; ``dims`` may differ."""
        return self._key == other._key

    @property
    def _key(self) -> tuple[Any, ...]:
        return self._runs, self.split_factor, self.elements_per_unit

    @property
    def runs(self) -> tuple[_Run, ...]:
        """``(number of consecutive ranks, units that each of them holds)``, in lowest terms."""
        return self._runs

    @property
    def num_shards(self) -> int:
        """Ranks along the mesh axis, including those that hold nothing."""
        return sum(count for count, _ in self._runs)

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units per rank, in lowest terms. Expands to one integer per rank."""
        return tuple(units for count, units in self._runs for _ in range(count))

    def runs_in(self, shape: Sequence[int]) -> list[_Run]:
        """``(number of consecutive ranks, elements that each of them holds)`` of a part.

        Raises:
            ValueError: as `unit_numel`.
        """
        unit, numel = self.unit_numel(shape), math.prod(shape)
        runs = [(count, units * unit) for count, units in self._runs]
        return runs if self.elements_per_unit is None else list(clipped(runs, 0, numel))

    @property
    def total_units(self) -> int:
        """Units of the whole tensor; 0 for a tensor without elements."""
        return sum(count * units for count, units in self._runs)

    def local_range(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """The half-open flat range, in elements, that ``rank`` holds of a tensor of ``shape``.

        Raises:
            ValueError: the units do not divide ``shape[:len(dims)]``, or there is no such rank.
        """
        unit, numel = self.unit_numel(shape), math.prod(shape)
        if rank < 0:
            raise ValueError(f"rank must not be negative, got {rank}")
        before = 0
        for count, units in self._runs:
            if rank < count:
                start = (before + rank * units) * unit
                return min(start, numel), min(start + units * unit, numel)
            rank -= count
            before += count * units
        raise ValueError(f"{self} has {self.num_shards} ranks, there is no rank beyond them")

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Elements per unit for a tensor of ``shape`` (0 where it has none).

        Raises:
            ValueError: the units do not divide ``shape[:len(dims)]``; or, of fixed sizes, they are
                fewer elements than it has.
        """
        numel, total = math.prod(shape), self.total_units
        if numel == 0:
            return 0
        if self.elements_per_unit is not None:
            if total * self.elements_per_unit < numel:
                raise ValueError(
                    f"{self} does not fit a tensor of shape {tuple(shape)}: its {total} units have "
                    f"{total * self.elements_per_unit} elements, and the tensor has {numel}"
                )
            return self.elements_per_unit
        divided = math.prod(shape[: len(self.dims)])
        if len(self.dims) > len(shape) or total == 0 or divided % total:
            raise ValueError(
                f"{self} does not fit a tensor of shape {tuple(shape)}: its {total} units must "
                f"divide the product of dimensions {self.dims}, which is {divided}"
            )
        return numel // total

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether ranks hold parts: True, along ``dim`` if it is one of `dims`.

        Code that goes on to read ``dim``, as of a ``Shard``, gets an error.
        """
        return dim is None or dim in self.dims

    @property
    def dim(self) -> int:
        """There is none.

        Raises:
            AttributeError: always. It says what to do.
        """
        raise AttributeError(
            "RaggedShard has no 'dim': a rank holds a flat range of elements (local_range), which "
            "may begin within a row. To give a tensor this placement, call "
            "vescale_fsdp.ragged.redistribute(tensor, placements=...). For code that needs torch's "
            "Shard, call fully_shard(..., shard_placement_fn=lambda p: Shard(0))"
        )

    def _replicate_to_shard(self, *_: object) -> NoReturn:
        """What ``DTensor.redistribute`` of a plain DTensor calls.

        Raises:
            NotImplementedError: always. It says what to do.
        """
        raise NotImplementedError(
            f"DTensor.redistribute cannot cut a tensor by {self}: call "
            "vescale_fsdp.ragged.redistribute(tensor, placements=...)"
        )

    _reduce_shard_tensor = _replicate_to_shard  # of one that is partial

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedShard):
            return False
        return self.dims == other.dims and self.cuts_like(other)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.dims, self._key))

    def __reduce__(self) -> tuple[Any, ...]:
        # The base class is a C++ object: the default protocol cannot rebuild it. A function, not
        # a bound method: torch.load(weights_only=True) allows only what it knows by name.
        return _rebuild_placement, (self.dims, *self._key)

    def __repr__(self) -> str:
        if len(self._runs) > 8:
            units = f"{self._runs[0]}...{self._runs[-1]} as (ranks, units)"
        elif self.num_shards > 16:
            units = f"{self._runs} as (ranks, units)"
        else:
            units = f"{self.local_units}"
        strided = f", split_factor={self.split_factor}" if self.split_factor > 1 else ""
        if self.elements_per_unit is not None:
            strided += f", elements_per_unit={self.elements_per_unit}"
        return f"RaggedShard(dims={self.dims}, local_units={units}{strided})"


def clipped(runs: Iterable[_Run], start: int, stop: int) -> Iterable[_Run]:
    """What ranks hold of [start, stop), as runs; O(number of runs)."""
    position = 0
    for count, units in runs:
        end = position + count * units
        if max(position, start) >= min(end, stop):  # nothing of it
            yield count, 0
        elif start <= position and end <= stop:
            yield count, units
        else:  # an end of the slice lies in this run: its ranks before, at and after the ends
            yield from _clipped_run(position, count, units, start, stop)
        position = end


def _clipped_run(position: int, count: int, units: int, start: int, stop: int) -> Iterable[_Run]:
    first = max(0, (start - position) // units)
    last = min(count - 1, (stop - 1 - position) // units)
    yield first, 0
    done = first
    for rank in sorted({first, last}):
        here = position + rank * units
        if rank > done:  # the whole ones between the ends
            yield rank - done, units
        yield 1, min(stop, here + units) - max(start, here)
        done = rank + 1
    yield count - done, 0


def _rebuild_placement(
    dims: tuple[int, ...],
    runs: tuple[_Run, ...],
    split_factor: int,
    elements_per_unit: int | None = None,
) -> RaggedShard:
    """What ``pickle`` and ``torch.load`` call."""
    return RaggedShard._from_runs(dims, runs, split_factor, elements_per_unit)
