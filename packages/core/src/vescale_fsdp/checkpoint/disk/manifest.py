"""The manifest: what is in a checkpoint, where each byte of it lies, and its CRC32.

``manifest.json`` is JSON of a fixed form. It covers its own bytes too::

    {"seal": {"format": ..., "version": 1, "id": ..., "body_bytes": 321, "body_crc32": ...},
    "seal_crc32": "5d2f0c6a",                                     <- of the first line
    "body": {"world_size": 2, ..., "tensors": {...}, ...}}        <- body_bytes, body_crc32

so the first lines say which checkpoint this is without the rest. The body lists the data files
with their sizes, the tensors with their boxes, and the values, which are JSON texts. Together they
tile the data files: there is no byte that is not checked.

Whatever a manifest may claim, `parse` believes only what fits: plain file names, spans that do not
overlap and do not leave their file, boxes that tile their tensor, known dtypes, no name twice.
"""

from __future__ import annotations

import io
import math
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, BinaryIO, NoReturn

import torch

from vescale_fsdp.checkpoint.disk import jsons
from vescale_fsdp.checkpoint.disk.geometry import boxes_fault, spans_fault, spans_tile
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointWriteError

NAME = "manifest.json"
FORMAT, VERSION = "vescale-fsdp checkpoint", 1
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
SEAL_BYTES = 1 << 16  # the first lines take less
# A trillion parameters in 60 layers of 384 experts, each tensor with two moments and a step, are
# 280,000 tensors of 260 bytes, 73 MB. On 4096 ranks 3 tensors of each unit lie in a piece or two
# on each: 1.1 million boxes of 130 bytes, 200 MB (one box each: 100 MB).
MOST_BYTES = 1 << 29
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_CRC = re.compile(r"[0-9a-f]{8}")
_LARGEST = 2**63 - 1
_ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_ZEROS = [(0,) * num_dims for num_dims in range(65)]
_INT = {int}


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
    """A tensor, cut into boxes that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Variant:
    """A JSON text, as the named ranks had it."""

    ranks: tuple[int, ...]  # ascending; the first of them has written it
    span: Span


@dataclass(frozen=True, slots=True)
class Seal:
    """Which checkpoint this is.

    ``sequence`` is one more than that of any checkpoint that was there beside it: the order in
    which they were made, whatever clocks and step numbers say.
    """

    id: str
    sequence: int
    step: int | None
    created: str
    body_bytes: int = 0
    body_crc32: str = "00000000"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without its data. Sizes are in bytes."""

    seal: Seal
    world_size: int
    software: dict[str, str]
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    values: dict[str, tuple[Variant, ...]]

    @property
    def num_bytes(self) -> int:
        """Of the data files together."""
        return sum(self.files.values())

    def spans(self) -> Iterator[tuple[Span, str]]:
        """All spans, with words for what they hold."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                where = f" at {list(chunk.offsets)}" if len(tensor.chunks) > 1 else ""
                yield chunk.span, f"tensor {name!r}{where}"
        for name, variants in self.values.items():
            for variant in variants:
                where = f" of rank {variant.ranks[0]}" if len(variants) > 1 else ""
                yield variant.span, f"value {name!r}{where}"

    # Text

    def render(self) -> bytes:
        """The manifest's file.

        Raises:
            CheckpointWriteError: it would be longer than `MOST_BYTES`, which `read` refuses.
        """
        body = {
            "world_size": self.world_size,
            "software": self.software,
            "files": self.files,
        }
        lines = [f'"body": {jsons.dump(body)[:-1]},"tensors":{{']
        lines.append(",\n".join(_tensor_text(*item) for item in self.tensors.items()))
        lines.append('},"values":{')
        lines.append(",\n".join(_values_text(*item) for item in self.values.items()))
        lines.append("}}}\n")
        rest = "\n".join(lines).encode()
        seal = {"format": FORMAT, "version": VERSION, **asdict(self.seal)}
        seal |= {"body_bytes": len(rest), "body_crc32": _hex(zlib.crc32(rest))}
        first = f'{{"seal": {jsons.dump(seal)},\n'.encode()
        text = first + _second_line(first) + rest
        if len(text) > MOST_BYTES:
            raise CheckpointWriteError(
                f"{NAME} of {len(self.tensors)} tensors would have {len(text)} bytes, expected "
                f"{MOST_BYTES} at most: save fewer tensors, or on fewer ranks"
            )
        return text

    @staticmethod
    def parse_seal(start: bytes, where: str) -> tuple[Seal, int]:
        """The seal in the first bytes of a manifest, and how many bytes it takes.

        Raises:
            CheckpointCorruptError: it is damaged, or of a version that is not known here.
        """
        first, newline, others = start.partition(b"\n")
        first += newline
        second = _second_line(first)
        if not first.startswith(b'{"seal": ') or not first.endswith(b",\n"):
            raise CheckpointCorruptError(f"{where} is damaged, or no manifest: no seal in line 1")
        if not others.startswith(second):
            raise CheckpointCorruptError(f"{where} is damaged: the CRC32 of its seal is another")
        read = _Reader(where)
        fields = read.json(first.removeprefix(b'{"seal": ')[:-2])
        names = ["format", "version", *Seal.__dataclass_fields__]
        if isinstance(fields, dict) and fields.get("version") != VERSION:
            raise CheckpointCorruptError(
                f"{where} has version {fields.get('version')!r}; this vescale-fsdp reads version "
                f"{VERSION}: use the one that has written it, or a newer one"
            )
        fields = read.fields(fields, "the seal", names)
        if fields.pop("format") != FORMAT:
            read.fail("the seal has another format")
        del fields["version"]
        for name in ("sequence", "body_bytes"):
            read.count(fields[name], name)
        if fields["step"] is not None and type(fields["step"]) is not int:
            read.fail(f"step is {fields['step']!r}")
        for name in ("id", "created", "body_crc32"):
            read.text(fields[name], name)
        return Seal(**fields), len(first) + len(second)

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        """The manifest in a file's bytes, all of it checked.

        Raises:
            CheckpointCorruptError: naming the file (``where``) and what is wrong.
        """
        return Manifest.read(io.BytesIO(data), len(data), where)

    @staticmethod
    def read(stream: BinaryIO, num_bytes: int, where: str) -> Manifest:
        """The manifest in an open file of ``num_bytes``. Raises as `parse` does.

        A file that is too long, or not as long as its seal says, is refused before it is read.

        Cost: for 10^6 tensors, 200 MB of text, 15 s and 0.7 GB.
        """
        start = stream.read(SEAL_BYTES)
        seal, begin = Manifest.parse_seal(start, where)
        if num_bytes != begin + seal.body_bytes:
            raise CheckpointCorruptError(
                f"{where} has {num_bytes} bytes, expected {begin + seal.body_bytes}"
            )
        if num_bytes > MOST_BYTES:
            raise CheckpointCorruptError(
                f"{where} is refused: it has {num_bytes} bytes, expected {MOST_BYTES} at most. It "
                "was damaged or made by hand; load another one"
            )
        return _parsed(seal, start[begin:] + stream.read(), where)


def _parsed(seal: Seal, rest: bytes, where: str) -> Manifest:
    if len(rest) != seal.body_bytes or _hex(zlib.crc32(rest)) != seal.body_crc32:
        raise CheckpointCorruptError(f"{where} is damaged: its CRC32 is another")
    if not rest.startswith(b'"body": ') or not rest.endswith(b"}\n"):
        raise CheckpointCorruptError(f"{where} has no body")
    reader = _Reader(where)
    try:
        text = str(memoryview(rest)[len('"body": ') : -2], "ascii")
        del rest  # as large as the text
        return reader.manifest(seal, text)
    except ValueError as error:
        reader.fail(str(error))


def _hex(crc32: int) -> str:
    return f"{crc32:08x}"


def _second_line(first: bytes) -> bytes:
    return f'"seal_crc32": "{_hex(zlib.crc32(first))}",\n'.encode()


def _span_fields(span: Span) -> dict[str, Any]:
    return {
        "file": span.file,
        "offset": span.offset,
        "bytes": span.length,
        "crc32": _hex(span.crc32),
    }


def _tensor_text(name: str, tensor: TensorEntry) -> str:
    chunks = [
        {"offsets": chunk.offsets, "sizes": chunk.sizes, **_span_fields(chunk.span)}
        for chunk in tensor.chunks
    ]
    fields = {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
    return f"{jsons.dump(name)}:{jsons.dump(fields)}"


def _values_text(name: str, variants: tuple[Variant, ...]) -> str:
    fields = [{"ranks": variant.ranks, **_span_fields(variant.span)} for variant in variants]
    return f"{jsons.dump(name)}:{jsons.dump(fields)}"


class _Reader:
    """Turns JSON into a manifest, and refuses what does not fit. ``where`` names the file."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._walk = jsons.Walk("")
        self._files: dict[str, int] = {}
        self._spans: dict[str, list[Span]] = {}

    def fail(self, what: str) -> NoReturn:
        raise CheckpointCorruptError(
            f"{self._where} is refused: {what}. It was damaged or made by hand; load another one"
        )

    def json(self, text: bytes) -> Any:
        try:
            return jsons.load(text)
        except ValueError as error:
            self.fail(str(error))

    def fields(self, value: Any, what: str, names: list[str]) -> dict[str, Any]:
        """An object with exactly these names."""
        if type(value) is not dict or sorted(value) != sorted(names):
            found = sorted(value) if isinstance(value, dict) else value
            self.fail(f"{what} has {found!r}, expected {sorted(names)}")
        return dict(value)

    def count(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            self.fail(f"{what} is {value!r}, expected a number from 0 to 2**63 - 1")
        return int(value)

    def counts(self, value: Any, what: str) -> tuple[int, ...]:
        if type(value) is not list or len(value) > 64:
            self.fail(f"{what} is {value!r}, expected a list of at most 64 numbers")
        return tuple(self.count(each, what) for each in value)

    def text(self, value: Any, what: str) -> str:
        if type(value) is not str:
            self.fail(f"{what} is {value!r}, expected a text")
        return str(value)

    def manifest(self, seal: Seal, text: str) -> Manifest:
        """The manifest of a body. Raises ValueError if it is no JSON."""
        walk = self._walk = jsons.Walk(text)
        body = walk.object(self._part)
        names = ["world_size", "software", "files", "tensors", "values"]
        if list(body) != names:
            self.fail(f"the body has {list(body)}, expected {names}")
        walk.end()
        manifest = Manifest(seal, **body)
        self._check_files(manifest)
        return manifest

    def _part(self, name: str) -> Any:
        """The value of a name in the body. The files come before what lies in them."""
        walk = self._walk
        if name == "software":
            return walk.object(lambda each: self.text(walk.value(), each))
        if name == "files":
            return walk.object(self._file)
        if name == "tensors":
            return walk.object(lambda each: self._tensor(each, walk.value()))
        if name == "values":
            return walk.object(lambda each: self._variants(each, walk.value()))
        return self.count(walk.value(), name)

    def _file(self, file: str) -> int:
        if not _FILE.fullmatch(file) or file == NAME:
            self.fail(f"{file!r} is not the name of a data file in this directory")
        num_bytes = self.count(self._walk.value(), f"the size of {file!r}")
        self._files[file], self._spans[file] = num_bytes, []
        return num_bytes

    def _span(self, fields: dict[str, Any], what: str) -> Span:
        file = self.text(fields["file"], f"the file of {what}")
        if file not in self._files:
            self.fail(f"{what} lies in {file!r}, which is not among the files")
        crc32 = self.text(fields["crc32"], f"the CRC32 of {what}")
        if not _CRC.fullmatch(crc32):
            self.fail(f"the CRC32 of {what} is {crc32!r}, expected 8 hexadecimal digits")
        offset = self.count(fields["offset"], f"the offset of {what}")
        length = self.count(fields["bytes"], f"the bytes of {what}")
        if offset + length > self._files[file]:
            self.fail(f"{what} ends at byte {offset + length} of {self._files[file]} of {file!r}")
        span = Span(file, offset, length, int(crc32, 16))
        self._spans[file].append(span)
        return span

    def _tensor(self, name: str, value: Any) -> TensorEntry:
        entry = self._fitting(value)
        return self._tensor_by_steps(f"tensor {name!r}", value) if entry is None else entry

    def _fitting(self, value: Any) -> TensorEntry | None:
        """A tensor that fits, in a third of the time of `_tensor_by_steps`; else None."""
        try:
            dtype, shape, boxes = value["dtype"], value["shape"], value["chunks"]
            itemsize = _ITEMSIZES[dtype]
            if len(value) != 3 or not type(shape) is type(boxes) is list or not boxes:
                return None
            whole, chunks = tuple(shape), []
            for box in boxes:
                offsets, sizes, file = box["offsets"], box["sizes"], box["file"]
                offset, length, crc32 = box["offset"], box["bytes"], box["crc32"]
                numbers = (*shape, *offsets, *sizes, offset, length)
                fits = (
                    len(box) == 6
                    and type(offsets) is type(sizes) is list
                    and len(offsets) == len(sizes) == len(shape) <= 64
                    and set(map(type, numbers)) == _INT  # no bool, which equals a number
                    and min(numbers) >= 0
                    and max(numbers) <= _LARGEST
                    and offset + length <= self._files[file]
                    and length == math.prod(sizes) * itemsize
                    and _CRC.fullmatch(crc32)
                )
                if not fits:
                    return None
                # Equal objects are kept once.
                at = tuple(offsets) if any(offsets) else _ZEROS[len(offsets)]
                span = Span(sys.intern(file), offset, length, int(crc32, 16))
                chunks.append(Chunk(at, whole if sizes == shape else tuple(sizes), span))
        except (KeyError, TypeError):
            return None
        is_whole = len(chunks) == 1 and chunks[0].sizes == whole and not any(chunks[0].offsets)
        if not is_whole and boxes_fault(whole, [(each.offsets, each.sizes) for each in chunks]):
            return None
        for chunk in chunks:
            self._spans[chunk.span.file].append(chunk.span)
        return TensorEntry(sys.intern(dtype), whole, tuple(chunks))

    def _tensor_by_steps(self, what: str, value: Any) -> TensorEntry:
        fields = self.fields(value, what, ["dtype", "shape", "chunks"])
        if fields["dtype"] not in DTYPES:
            self.fail(f"{what} has the unknown dtype {fields['dtype']!r}")
        itemsize = DTYPES[fields["dtype"]].itemsize
        shape = self.counts(fields["shape"], f"the shape of {what}")
        if type(fields["chunks"]) is not list:
            self.fail(f"the chunks of {what} are {fields['chunks']!r}, expected a list")
        chunks = []
        names = ["offsets", "sizes", "file", "offset", "bytes", "crc32"]
        for each in fields["chunks"]:
            each = self.fields(each, f"a chunk of {what}", names)
            offsets = self.counts(each["offsets"], f"the offsets of {what}")
            sizes = self.counts(each["sizes"], f"the sizes of {what}")
            span = self._span(each, what)
            if span.length != math.prod(sizes) * itemsize:
                self.fail(
                    f"{what} has a box of {list(sizes)} in {span.length} bytes, expected "
                    f"{math.prod(sizes) * itemsize}"
                )
            chunks.append(Chunk(offsets, sizes, span))
        fault = boxes_fault(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if fault:
            self.fail(f"{what} of shape {list(shape)} is not whole: {fault}")
        return TensorEntry(fields["dtype"], shape, tuple(chunks))

    def _variants(self, name: str, value: Any) -> tuple[Variant, ...]:
        what = f"value {name!r}"
        if type(value) is not list or not value:
            self.fail(f"{what} is {value!r}, expected a list of variants")
        variants: list[Variant] = []
        seen: set[int] = set()
        for each in value:
            fields = self.fields(each, what, ["ranks", "file", "offset", "bytes", "crc32"])
            if type(fields["ranks"]) is not list or not fields["ranks"]:
                self.fail(f"the ranks of {what} are {fields['ranks']!r}")
            ranks = tuple(self.count(rank, f"a rank of {what}") for rank in fields["ranks"])
            if seen.intersection(ranks) or len(set(ranks)) < len(ranks):
                self.fail(f"{what} has a rank twice")
            seen.update(ranks)
            variants.append(Variant(ranks, self._span(fields, what)))
        return tuple(variants)

    def _check_files(self, manifest: Manifest) -> None:
        if all(
            spans_tile(manifest.files[file], sorted(spans, key=attrgetter("offset")))
            for file, spans in self._spans.items()
        ):
            return
        spans: dict[str, list[tuple[int, int, str]]] = {file: [] for file in manifest.files}
        for span, label in manifest.spans():
            spans[span.file].append((span.offset, span.length, label))
        for file, num_bytes in manifest.files.items():
            fault = spans_fault(num_bytes, spans[file])
            if fault:
                self.fail(f"in {file!r} {fault}")
