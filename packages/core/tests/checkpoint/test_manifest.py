from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp import CheckpointCorruptError, CheckpointWriteError, checkpoint
from vescale_fsdp.checkpoint.manifest import NAME, Chunk, Manifest, Seal, Span, TensorEntry

from .helpers import small_manifest

Body = dict[str, Any]


def text_of(body: Body, **seal: Any) -> bytes:
    """A manifest with any body, sealed as it should be: as somebody would who means harm."""
    rest = b'"body": ' + json.dumps(body).encode() + b"}\n"
    fields = {
        "format": "vescale-fsdp checkpoint",
        "version": 1,
        "id": "ab" * 16,
        "sequence": 3,
        "step": 100,
        "created": "",
        "body_bytes": len(rest),
        "body_crc32": f"{zlib.crc32(rest):08x}",
    }
    first = b'{"seal": ' + json.dumps({**fields, **seal}).encode() + b",\n"
    return first + f'"seal_crc32": "{zlib.crc32(first):08x}",\n'.encode() + rest


def body_of(manifest: Manifest) -> Body:
    body: Body = json.loads(manifest.render())["body"]
    return body


def test_a_manifest_is_json_and_comes_back() -> None:
    manifest = small_manifest()
    text = manifest.render()
    found = Manifest.parse(text, "manifest.json")
    assert found.tensors == manifest.tensors
    assert found.values == manifest.values
    assert (found.files, found.world_size) == (manifest.files, 2)
    assert json.loads(text)["seal"]["step"] == 100


def test_the_first_bytes_tell_which_checkpoint_it_is() -> None:
    text = small_manifest().render()
    seal, length = Manifest.parse_seal(text[:500], "manifest.json")
    assert isinstance(seal, Seal)
    assert (seal.id, seal.sequence) == ("ab" * 16, 3)
    assert text[length:].startswith(b'"body": ')


def test_no_flipped_bit_and_no_cut_of_a_manifest_passes() -> None:
    text = small_manifest().render()
    for bit in range(8 * len(text)):
        data = bytearray(text)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match=r"^here"):
            Manifest.parse(bytes(data), "here")
    for length in range(len(text)):
        with pytest.raises(CheckpointCorruptError, match=r"^here"):
            Manifest.parse(text[:length], "here")


def tensor(body: Body) -> Body:
    found: Body = body["tensors"]["model.w"]
    return found


def chunk(body: Body, number: int = 0) -> Body:
    found: Body = tensor(body)["chunks"][number]
    return found


HOSTILE: dict[str, tuple[Callable[[Body], object], str]] = {
    "parent": (lambda b: b["files"].update({"../x.bin": 4}), r"'\.\./x\.bin' is not the name"),
    "absolute": (lambda b: b["files"].update({"/etc/passwd": 4}), "is not the name"),
    "dots": (lambda b: b["files"].update({"..": 4}), "is not the name"),
    "nul": (lambda b: b["files"].update({"a\0b": 4}), "is not the name"),
    "itself": (lambda b: b["files"].update({"manifest.json": 4}), "is not the name"),
    "unknown file": (lambda b: chunk(b).update(file="other"), "not among the files"),
    "huge offset": (lambda b: chunk(b).update(offset=2**62), "ends at byte 4611686018427387928"),
    "beyond numbers": (
        lambda b: chunk(b).update(offset=2**63),
        r"tensor 'model.w' .*<= 9223372036854775807",
    ),
    "negative": (lambda b: chunk(b).update(offset=-4), r"tensor 'model.w' .*>= 0"),
    "float": (lambda b: chunk(b).update(offset=0.0), "Expected `int`, got `float`"),
    "true": (
        lambda b: b.update(world_size=True),
        r"Expected `int`, got `bool` - at `\$.world_size`",
    ),
    "overlap": (lambda b: chunk(b).update(offset=2), "overlaps|belong to nothing"),
    "gap": (lambda b: b["files"].update({"rank-00001.bin": 44}), "bytes 40 to 44"),
    "bytes": (lambda b: chunk(b).update(bytes=20), "in 20 bytes, expected 24"),
    "box outside": (lambda b: chunk(b).update(offsets=[4, 0]), "exceeds"),
    "box twice": (lambda b: chunk(b, 1).update(offsets=[1, 0]), "overlap"),
    "box lacks": (lambda b: tensor(b)["chunks"].pop(), "hold 6 elements, expected 15"),
    "dimensions": (lambda b: chunk(b).update(sizes=[6]), "does not have the tensor's 2 dimensions"),
    "many dimensions": (lambda b: tensor(b).update(shape=[1] * 65), "length <= 64"),
    "shape without boxes": (
        lambda b: tensor(b).update(shape=[0, True], chunks=[]),
        r"tensor \'model.w\' .*`int`, got `bool` - at `\$.shape\[1\]`",
    ),
    "dtype": (lambda b: tensor(b).update(dtype="load"), "unknown dtype 'load'"),
    "quantized": (lambda b: tensor(b).update(dtype="qint8"), "unknown dtype"),
    "crc32": (lambda b: chunk(b).update(crc32="0x1"), r"tensor 'model.w' .*matching regex"),
    "more": (lambda b: tensor(b).update(run="os.system"), "unknown field `run`"),
    "fewer": (lambda b: b.pop("values"), "missing required field `values`"),
    "list": (lambda b: b.update(tensors=[]), r"`object`, got `array` - at `\$.tensors`"),
    "rank twice": (lambda b: b["values"]["extra"][0].update(ranks=[0, 0]), "has a rank twice"),
    "no ranks": (lambda b: b["values"]["extra"][0].update(ranks=[]), "value 'extra' .*length >= 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str) -> None:
    body = body_of(small_manifest())
    change, message = HOSTILE[name]
    Manifest.parse(text_of(body), "here")  # the premise: the form is right
    change(body)
    with pytest.raises(CheckpointCorruptError, match=f"here is refused.*({message})"):
        Manifest.parse(text_of(body), "here")


def test_a_name_that_comes_twice_is_refused_wherever_it_is() -> None:
    body = body_of(small_manifest())
    text = text_of(body)
    for once in ('"dtype": "bfloat16"', '"ranks": [1]', '"model.s": {', '"torch": "2.13.0"'):
        assert once.encode() in text
        twice = {'"model.s": {': '"model.s": ' + json.dumps(body["tensors"]["model.s"]) + ", "}
        spoilt = text.replace(once.encode(), f"{twice.get(once, once + ', ')}{once}".encode())
        data = spoilt[spoilt.index(b'"body": ') :]
        fields = {"body_bytes": len(data), "body_crc32": f"{zlib.crc32(data):08x}"}
        first = text_of(body, **fields)
        with pytest.raises(CheckpointCorruptError, match="occurs twice"):
            Manifest.parse(first[: first.index(b'"body": ')] + data, "here")


def test_names_may_have_quotation_marks_and_letters_of_any_kind() -> None:
    manifest = small_manifest()
    odd = {'a"b\\c': manifest.tensors["model.w"], "ünï\n": manifest.tensors["model.s"]}
    manifest = replace(manifest, tensors=odd, software={'"': '"'})
    assert Manifest.parse(manifest.render(), "here").tensors == odd


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ('{"world_size": 1, "world_size": 2}', "'world_size' occurs twice"),
        ('{"world_size": NaN}', "NaN is not JSON"),
        ('{"world_size": ' + "[" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_readers_understand_differently_is_refused(rest: str, message: str) -> None:
    data = b'"body": ' + rest.encode() + b"}\n"
    first = text_of({}, body_bytes=len(data), body_crc32=f"{zlib.crc32(data):08x}")
    start = first[: first.index(b'"body": ')]
    with pytest.raises(CheckpointCorruptError, match=message):
        Manifest.parse(start + data, "here")


def test_another_version_is_refused_by_its_number() -> None:
    text = text_of(body_of(small_manifest()), version=2)
    with pytest.raises(CheckpointCorruptError, match=r"has version 2; this .* reads version 1"):
        Manifest.parse(text, "here")


def many(num_tensors: int) -> Manifest:
    """A manifest of tensors of four bytes, each in one box."""
    file = "rank-00000.bin"
    tensors = {
        f"model.layers.{i}.mlp.down.weight": TensorEntry(
            "float32", (1, 1), (Chunk((0, 0), (1, 1), Span(file, 4 * i, 4, i)),)
        )
        for i in range(num_tensors)
    }
    return replace(small_manifest(), files={file: 4 * num_tensors}, tensors=tensors, values={})


def test_a_manifest_needs_little_more_memory_than_its_text() -> None:
    manifest = many(5000)
    text = manifest.render()
    tracemalloc.start()
    try:
        found = Manifest.parse(text, "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == replace(manifest, seal=found.seal)
    assert peak < 5 * len(text)  # 10 if all of the JSON is there at once


def test_a_manifest_beyond_the_limit_is_neither_written_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = many(10).render()
    monkeypatch.setattr("vescale_fsdp.checkpoint.manifest.MOST_BYTES", len(text) - 1)
    with pytest.raises(CheckpointWriteError, match=f"10 tensors would have {len(text)} bytes"):
        many(10).render()
    with pytest.raises(CheckpointCorruptError, match=f"{len(text)} bytes, .*{len(text) - 1} at m"):
        Manifest.parse(text, "here")


@pytest.mark.parametrize("start", ["nothing", "a manifest", "its seal"])
def test_a_sparse_manifest_of_a_tebibyte_is_refused_before_it_is_read(
    start: str, tmp_path: Path
) -> None:
    text = text_of(body_of(small_manifest()), body_bytes=1 << 40)
    starts = {
        "nothing": (b"", 1 << 40, "line 1 has no seal"),
        "a manifest": (small_manifest().render(), 1 << 40, "has 1099511627776 bytes, expected"),
        "its seal": (text, text.index(b'"body": ') + (1 << 40), "536870912 at most"),
    }
    data, num_bytes, message = starts[start]
    (tmp_path / "step-1").mkdir()
    with open(tmp_path / "step-1" / NAME, "wb") as stream:
        stream.write(data)
        stream.truncate(num_bytes)
    for use in (checkpoint.verify, checkpoint.read):
        with pytest.raises(CheckpointCorruptError, match=message):
            use(tmp_path / "step-1")
    assert checkpoint.latest(tmp_path) is None
