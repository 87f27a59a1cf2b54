"""The manifest: what is in a checkpoint, the place of each byte, and its CRC32.

``manifest.json`` is JSON of a fixed form. It covers its own bytes too::

    {"seal": {"format": ..., "version": 1, "id": ..., "body_bytes": 321, "body_crc32": ...},
    "seal_crc32": "5d2f0c6a",                                     <- of the first line
    "body": {"world_size": 2, ..., "tensors": {...}, ...}}        <- body_bytes, body_crc32

The first lines identify the checkpoint, so a reader can skip the body. The body lists the data
files with their sizes, the tensors with their boxes, and the values, which are JSON texts. Their
spans tile the data files, so a CRC32 covers every byte.

`parse` checks everything that it reads: file names are plain, spans do not overlap and do not
exceed their file, boxes tile their tensor, dtypes are known, no name occurs twice.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, BinaryIO, NoReturn

import msgspec
import torch

from vescale_fsdp.errors import CheckpointCorruptError, CheckpointWriteError

NAME = "manifest.json"
FORMAT, VERSION = "vescale-fsdp checkpoint", 1
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
SEAL_BYTES = 1 << 16  # the first lines are shorter
# Estimate: a trillion parameters in 60 layers of 384 experts, each tensor with two moments and a
# step, are 280,000 tensors of 260 bytes, 73 MB. On 4096 ranks each rank has one or two boxes of 3
# tensors of each unit: 1.1 million boxes of 130 bytes, 200 MB (with one box each: 100 MB).
MOST_BYTES = 1 << 29
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_EXPLAINED = 1 << 24  # bytes; errors in longer manifests have shorter messages, to save memory

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a data file."""

    file: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: row-major, in one span of one file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, split into boxes that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Variant:
    """A JSON text, and the ranks that had it."""

    ranks: tuple[int, ...]  # ascending; the first of them wrote it
    span: Span


@dataclass(frozen=True, slots=True)
class Seal:
    """Identifies a checkpoint.

    ``sequence`` is one more than the highest in the same folder at the time of the save. It gives
    the order of the saves, which clocks and step numbers may not.
    """

    id: str
    sequence: int
    step: int | None
    created: str
    body_bytes: int = 0
    body_crc32: str = "00000000"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint, without its data. Sizes are in bytes."""

    seal: Seal
    world_size: int
    software: dict[str, str]
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    values: dict[str, tuple[Variant, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files together."""
        return sum(self.files.values())

    def spans(self) -> Iterator[tuple[Span, str]]:
        """All spans, each with a description of its contents."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                where = f" at {list(chunk.offsets)}" if len(tensor.chunks) > 1 else ""
                yield chunk.span, f"tensor {name!r}{where}"
        for name, variants in self.values.items():
            for variant in variants:
                where = f" of rank {variant.ranks[0]}" if len(variants) > 1 else ""
                yield variant.span, f"value {name!r}{where}"

    def render(self) -> bytes:
        """The manifest's file.

        Raises:
            CheckpointWriteError: it would be longer than `MOST_BYTES`, which `read` refuses.
        """
        body = {"world_size": self.world_size, "software": self.software, "files": self.files}
        lines = [f'"body": {to_json(body)[:-1]},"tensors":{{']
        lines.append(",\n".join(_tensor_text(*item) for item in self.tensors.items()))
        lines.append('},"values":{')
        lines.append(",\n".join(_values_text(*item) for item in self.values.items()))
        lines.append("}}}\n")
        rest = "\n".join(lines).encode()
        seal = {"format": FORMAT, "version": VERSION, **asdict(self.seal)}
        seal |= {"body_bytes": len(rest), "body_crc32": _hex(zlib.crc32(rest))}
        first = f'{{"seal": {to_json(seal)},\n'.encode()
        text = first + _second_line(first) + rest
        if len(text) > MOST_BYTES:
            raise CheckpointWriteError(
                f"{NAME} of {len(self.tensors)} tensors would have {len(text)} bytes, expected "
                f"{MOST_BYTES} at most: save fewer tensors, or on fewer ranks"
            )
        return text

    @staticmethod
    def parse_seal(start: bytes, where: str) -> tuple[Seal, int]:
        """Parse the seal in the first bytes of a manifest. Returns it and its size in bytes.

        Raises:
            CheckpointCorruptError: it is damaged or has an unknown version.
        """
        first, newline, others = start.partition(b"\n")
        first += newline
        second = _second_line(first)
        if not first.startswith(b'{"seal": ') or not first.endswith(b",\n"):
            raise CheckpointCorruptError(
                f"{where} is damaged, or not a manifest: line 1 has no seal"
            )
        if not others.startswith(second):
            raise CheckpointCorruptError(
                f"{where} is damaged: the CRC32 of its seal does not match"
            )
        try:
            fields = from_json(first.removeprefix(b'{"seal": ')[:-2])
            if isinstance(fields, dict) and fields.get("version") != VERSION:
                raise CheckpointCorruptError(
                    f"{where} has version {fields.get('version')!r}; this vescale-fsdp reads "
                    f"version {VERSION}: use the one that has written it, or a newer one"
                )
            seal = msgspec.convert(fields, _Seal)
        except ValueError as error:
            _refuse(where, f"in its seal {error}")
        if seal.format != FORMAT:
            _refuse(where, "the seal has another format")
        found = Seal(
            seal.id, seal.sequence, seal.step, seal.created, seal.body_bytes, seal.body_crc32
        )
        return found, len(first) + len(second)

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        """Parse and check the manifest in a file's bytes.

        Raises:
            CheckpointCorruptError: naming the file (``where``) and what is wrong.
        """
        return Manifest.read(io.BytesIO(data), len(data), where)

    @staticmethod
    def read(stream: BinaryIO, num_bytes: int, where: str) -> Manifest:
        """Read and parse the manifest in an open file of ``num_bytes``. Raises as `parse` does.

        It raises before it reads the body if the file is too long, or if its length differs from
        that in the seal.
        """
        start = stream.read(SEAL_BYTES)
        seal, begin = Manifest.parse_seal(start, where)
        if num_bytes != begin + seal.body_bytes:
            raise CheckpointCorruptError(
                f"{where} has {num_bytes} bytes, expected {begin + seal.body_bytes}"
            )
        if num_bytes > MOST_BYTES:
            _refuse(where, f"it has {num_bytes} bytes, expected {MOST_BYTES} at most")
        rest = start[begin:] + stream.read()
        if len(rest) != seal.body_bytes or _hex(zlib.crc32(rest)) != seal.body_crc32:
            raise CheckpointCorruptError(f"{where} is damaged: its CRC32 does not match")
        if not rest.startswith(b'"body": ') or not rest.endswith(b"}\n"):
            raise CheckpointCorruptError(f"{where} has no body")
        try:
            return _parsed(seal, rest)
        except ValueError as error:
            _refuse(where, str(error))


def _refuse(where: str, what: str) -> NoReturn:
    raise CheckpointCorruptError(
        f"{where} is refused: {what}. It was damaged or made by hand; load another one"
    )


def _hex(crc32: int) -> str:
    return f"{crc32:08x}"


def _second_line(first: bytes) -> bytes:
    return f'"seal_crc32": "{_hex(zlib.crc32(first))}",\n'.encode()


# Text


def to_json(value: Any) -> str:
    """Return a value as JSON text, ASCII only, on one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def from_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError also for text that JSON parsers read in different ways."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return found


def _no_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _span_fields(span: Span) -> dict[str, Any]:
    fields = {"file": span.file, "offset": span.offset, "bytes": span.length}
    return {**fields, "crc32": _hex(span.crc32)}


def _tensor_text(name: str, tensor: TensorEntry) -> str:
    chunks = [
        {"offsets": chunk.offsets, "sizes": chunk.sizes, **_span_fields(chunk.span)}
        for chunk in tensor.chunks
    ]
    fields = {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
    return f"{to_json(name)}:{to_json(fields)}"


def _values_text(name: str, variants: tuple[Variant, ...]) -> str:
    fields = [{"ranks": variant.ranks, **_span_fields(variant.span)} for variant in variants]
    return f"{to_json(name)}:{to_json(fields)}"


# The form of the text


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Counts = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


class _Seal(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    id: str
    sequence: _Count
    step: int | None
    created: str
    body_bytes: _Count
    body_crc32: str


class _Part(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    file: str
    offset: _Count
    bytes: _Count
    crc32: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]


class _Chunk(_Part, forbid_unknown_fields=True, gc=False, kw_only=True):
    offsets: _Counts
    sizes: _Counts


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: _Counts
    chunks: tuple[_Chunk, ...]


class _Variant(_Part, forbid_unknown_fields=True, gc=False, kw_only=True):
    ranks: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1)]


_TENSOR = msgspec.json.Decoder(_Tensor)
_VARIANTS = msgspec.json.Decoder(Annotated[tuple[_Variant, ...], msgspec.Meta(min_length=1)])


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    world_size: _Count
    software: dict[str, str]
    files: dict[str, _Count]
    tensors: dict[str, msgspec.Raw]  # decoded one by one, to save memory
    values: dict[str, msgspec.Raw]


def _parsed(seal: Seal, rest: bytes) -> Manifest:
    """Parse the body of a manifest. Raises ValueError if a check fails."""
    text = memoryview(rest)[len('"body": ') : -2]
    try:
        body = msgspec.json.decode(text, type=_Body)
    except msgspec.MsgspecError:
        _check_json(text)
        raise
    for file in body.files:
        if not FILE_NAME.fullmatch(file) or file == NAME:
            raise ValueError(f"{file!r} is not the name of a data file in this directory")
    tensors: dict[str, TensorEntry] = {}
    for name, raw in body.tensors.items():
        what = f"tensor {name!r}"
        tensors[name] = _tensor(what, _decoded(_TENSOR, what, raw), body.files)
    values: dict[str, tuple[Variant, ...]] = {}
    for name, raw in body.values.items():
        what = f"value {name!r}"
        values[name] = _variants(what, _decoded(_VARIANTS, what, raw), body.files)
    found = Manifest(seal, body.world_size, body.software, body.files, tensors, values)
    if rest.count(b'"') != _num_quotes(found):
        _check_json(text)
        raise ValueError("a name occurs twice in it")
    by_file: dict[str, list[Span]] = {file: [] for file in found.files}
    for span, _ in found.spans():
        by_file[span.file].append(span)
    for file, spans in by_file.items():
        if not _tiled(found.files[file], spans):
            labelled = ((s.offset, s.length, what) for s, what in found.spans() if s.file == file)
            raise ValueError(f"in {file!r} {spans_fault(found.files[file], labelled)}")
    return found


def _tiled(num_bytes: int, spans: list[Span]) -> bool:
    """Whether `spans_fault` would find nothing. Needs less memory, because it has no labels."""
    spans.sort(key=attrgetter("offset"))
    end = 0
    for span in spans:
        if span.length and span.offset != end:
            return False
        end += span.length
    return end == num_bytes


def _decoded(decoder: msgspec.json.Decoder[Any], what: str, raw: msgspec.Raw) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{what} does not fit: {error}") from error


def _check_json(text: memoryview) -> None:
    """Raise a precise ValueError if a text of at most 16 MiB is not valid JSON."""
    if len(text) <= _EXPLAINED:
        from_json(bytes(text))


def _num_quotes(found: Manifest) -> int:
    """Return how many quotation marks the text has if no key occurs twice in an object."""
    texts = [*found.software, *found.software.values(), *found.files, *found.tensors]
    marks = sum(each.count('"') + 2 for each in chain(texts, found.values))
    chunks = sum(len(each.chunks) for each in found.tensors.values())
    variants = sum(len(each) for each in found.values.values())
    # Keys and string values: 6 keys outside and in the body; 3 and 1 in a tensor; 6 and 2 in a
    # chunk; 5 and 2 in a variant.
    return marks + 2 * (6 + 4 * len(found.tensors) + 8 * chunks + 7 * variants)


def _span(what: str, part: _Part, files: dict[str, int]) -> Span:
    if part.file not in files:
        raise ValueError(f"{what} is in {part.file!r}, which is not among the files")
    if part.offset + part.bytes > files[part.file]:
        raise ValueError(
            f"{what} ends at byte {part.offset + part.bytes} of {files[part.file]} of {part.file!r}"
        )
    return Span(sys.intern(part.file), part.offset, part.bytes, int(part.crc32, 16))


def _tensor(what: str, entry: _Tensor, files: dict[str, int]) -> TensorEntry:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{what} has the unknown dtype {entry.dtype!r}")
    itemsize = DTYPES[entry.dtype].itemsize
    chunks = []
    for each in entry.chunks:
        if each.bytes != math.prod(each.sizes) * itemsize:
            raise ValueError(
                f"{what} has a box of {list(each.sizes)} in {each.bytes} bytes, expected "
                f"{math.prod(each.sizes) * itemsize}"
            )
        chunks.append(Chunk(each.offsets, each.sizes, _span(what, each, files)))
    at_zero = (0,) * len(entry.shape)
    if len(chunks) != 1 or (chunks[0].offsets, chunks[0].sizes) != (at_zero, entry.shape):
        fault = boxes_fault(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if fault:
            raise ValueError(f"{what} of shape {list(entry.shape)} is not whole: {fault}")
    return TensorEntry(sys.intern(entry.dtype), entry.shape, tuple(chunks))


def _variants(what: str, found: Sequence[_Variant], files: dict[str, int]) -> tuple[Variant, ...]:
    ranks = [rank for each in found for rank in each.ranks]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"{what} has a rank twice")
    return tuple(Variant(each.ranks, _span(what, each, files)) for each in found)


# Checks: boxes tile a tensor, spans tile a file


def boxes_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why the boxes do not tile a tensor of this shape, else "".

    Boxes tile a tensor if no two overlap and together they have as many elements as the tensor.

    Cost: a sort, and a comparison of each pair of boxes that overlap along the longest dimension.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"the box at {list(offsets)} does not have the tensor's {len(shape)} dimensions"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"the box at {list(offsets)} of {list(sizes)} exceeds {list(shape)}"
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        return f"its boxes hold {held} elements, expected {math.prod(shape)}"
    pair = _overlapping(shape, [box for box in boxes if math.prod(box[1])])
    return f"its boxes at {list(pair[0][0])} and {list(pair[1][0])} overlap" if pair else ""


def _overlapping(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    if not shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    active: list[tuple[int, Box]] = []  # sorted by their end along this dimension
    for box in sorted(boxes, key=lambda box: box[0][longest]):
        start = box[0][longest]
        del active[: bisect_right(active, start, key=lambda entry: entry[0])]
        for _, other in active:
            if _overlap(box, other):
                return other, box
        insort(active, (start + box[1][longest], box))
    return None


def _overlap(a: Box, b: Box) -> bool:
    return all(x < y + t and y < x + s for x, s, y, t in zip(a[0], a[1], b[0], b[1], strict=True))


def spans_fault(num_bytes: int, spans: Iterable[tuple[int, int, str]]) -> str:
    """Return why spans (first byte, number of bytes, label) do not tile a file, else ""."""
    end, last = 0, "its beginning"
    for start, length, label in sorted(spans):
        if length == 0 and start <= num_bytes:
            continue
        if start < end:
            return f"{label} overlaps {last}"
        if start > end:
            return f"bytes {end} to {start}, between {last} and {label}, belong to nothing"
        end, last = start + length, label
        if end > num_bytes:
            return f"{label} ends at byte {end} of {num_bytes}"
    return "" if end == num_bytes else f"bytes {end} to {num_bytes} belong to nothing"
