"""The safetensors format: what is written others read, and what does not fit is refused."""

from __future__ import annotations

import json
import math
import random
import struct
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp import CheckpointCorruptError, CheckpointIncompleteError, CheckpointValueError
from vescale_fsdp.checkpoint.safetensors_files import (
    File,
    PlacedWriter,
    TensorFiles,
    index_of,
    lay_out,
    make_files,
    runs_of,
)

GOOD = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, header: Any, num_bytes: int = 24) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def fields(**changed: Any) -> dict[str, Any]:
    return {"w": {**GOOD["w"], **changed}}


TWICE = b'{"w": {"dtype": "U8", "shape": [24], "data_offsets": [0, 24]}, "w": {}}'
HALF = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
BAD: list[tuple[Any, str]] = [
    (b"[1]", "invalid type: sequence"),
    (b"{", "EOF while parsing"),
    (b"\xff", "invalid UTF-8"),
    (b"[" * 100_000, "invalid type: sequence"),
    (TWICE, "missing field `dtype`"),
    ({"w": 3}, "invalid type: integer `3`"),
    (fields(dtype="F31"), "unknown variant `F31`"),
    (fields(dtype=["F32"]), "expected string or map"),
    (fields(shape=[2, -3]), "invalid value: integer `-3`"),
    (fields(shape=[2, True]), "invalid type: boolean"),
    (fields(shape=[1] * 65), "invalid shape"),
    (fields(shape=[2**62, 2**62]), "overflow"),
    (fields(data_offsets=[0, 23]), "invalid shape, data type, or offset"),
    (fields(data_offsets=[0]), "invalid length 1"),
    (fields(data_offsets=[24, 48]), "invalid offset for tensor `w`"),
    ({"a": HALF, "b": HALF}, "invalid offset"),
    ({"a": HALF}, "not fully covered"),
    ({"__metadata__": {"format": 3}, **GOOD}, "invalid type: integer `3`"),
]


@pytest.mark.parametrize(("header", "message"), BAD)
def test_a_header_that_does_not_fit_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptError, match=message):
        TensorFiles(write(tmp_path / "x.safetensors", header))


def test_a_header_that_fits_is_read(tmp_path: Path) -> None:
    """The premise of the test above."""
    entry = TensorFiles(write(tmp_path / "x.safetensors", GOOD)).entries["w"]
    assert (entry.dtype, entry.shape, entry.num_bytes) == (torch.float32, (2, 3), 24)


def test_a_header_may_not_be_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in (3, 2**40, 2**63):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(CheckpointCorruptError, match=r"x\.safetensors is refused: .*header"):
            TensorFiles(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointCorruptError, match="header too small"):
        TensorFiles(path)


def test_a_file_that_was_cut_or_grew_is_refused(tmp_path: Path) -> None:
    for num_bytes in (23, 25):
        with pytest.raises(
            CheckpointCorruptError, match=r"x\.safetensors is refused: .*not fully covered"
        ):
            TensorFiles(write(tmp_path / "x.safetensors", GOOD, num_bytes))


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write(tmp_path / "x.safetensors", GOOD)
    index = inner / "model.safetensors.index.json"
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "x.bin", "..", ""):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointCorruptError, match="is not the name of a safetensors file"):
            TensorFiles(inner)


def test_an_index_says_what_its_files_say(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path / "a.safetensors", GOOD)
    write(tmp_path / "b.safetensors", GOOD)
    cases = [
        ({"w": "a.safetensors", "v": "b.safetensors"}, "'w' is in a.safetensors and in b."),
        ({"w": "a.safetensors", "v": "a.safetensors"}, "'v' is in a.safetensors, but it is in no"),
        ({"v": "a.safetensors"}, "'v' is in a.safetensors, but it is in none"),
        ([], "has no weight_map"),
        ({"w": 3}, "has no weight_map"),
    ]
    for weights, message in cases:
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(CheckpointCorruptError, match=message):
            TensorFiles(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "c.safetensors"}}))
    with pytest.raises(CheckpointIncompleteError, match=r"c\.safetensors is missing"):
        TensorFiles(tmp_path)


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIncompleteError, match=r"neither model\.safetensors nor"):
        TensorFiles(tmp_path)


# Out


SHAPES = {"a": (torch.int8, (3,)), "b": (torch.float32, (2, 2)), "c": (torch.bfloat16, ())}


def test_every_tensor_lies_at_a_multiple_of_its_element_size() -> None:
    (file,) = lay_out(SHAPES, 100, {"format": "pt"})
    assert len(file.head) % 8 == 0
    assert {n: e.offset - len(file.head) for n, e in file.entries.items()} == {
        "b": 0,  # 16 bytes
        "c": 16,  # 2
        "a": 18,
    }
    assert file.num_bytes == len(file.head) + 21


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    """Of 3, 16 and 2 bytes: 16 do not fit beside 3, nor 2 beside 16."""
    files = lay_out(SHAPES, 17, {})
    assert [(file.name, list(file.entries)) for file in files] == [
        ("model-00001-of-00003.safetensors", ["a"]),
        ("model-00002-of-00003.safetensors", ["b"]),
        ("model-00003-of-00003.safetensors", ["c"]),
    ]
    index = json.loads(index_of(files))
    assert index["metadata"] == {"total_size": 21}
    assert index["weight_map"]["b"] == "model-00002-of-00003.safetensors"


def test_a_dtype_that_the_format_has_not_is_named() -> None:
    with pytest.raises(CheckpointValueError, match=r"'z' has the dtype torch\.complex128"):
        lay_out({"z": (torch.complex128, (1,))}, 100, {})


def written(folder: Path, values: dict[str, torch.Tensor]) -> File:
    (file,) = lay_out({n: (v.dtype, v.shape) for n, v in values.items()}, 10**9, {"who": "me"})
    make_files(folder, [file])
    with PlacedWriter(folder) as writer:
        for name, value in values.items():
            for row in range(value.shape[0] if value.dim() else 1):  # box by box
                box, at = (value[row : row + 1], [row, 0]) if value.dim() else (value, [])
                writer.write(name, file.entries[name], at[: value.dim()], box)
        writer.finish()
    return file


def test_the_safetensors_package_reads_each_dtype(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    reader = pytest.importorskip("safetensors.torch")
    from vescale_fsdp.checkpoint import safetensors_files as ours

    values = {
        name: torch.arange(6, dtype=torch.uint8).view(2, 3).to(dtype)
        for name, dtype in ours._DTYPES.items()
    }
    values |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "ünï": torch.ones(1)}
    written(tmp_path, values)
    found = reader.load_file(tmp_path / "model.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].flatten().tolist() == value.flatten().tolist(), name
    with package.safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"who": "me"}


def test_what_the_safetensors_package_writes_is_read(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    values = {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    package.save_file(values, tmp_path / "x.safetensors", metadata={"format": "pt"})
    files = TensorFiles(tmp_path / "x.safetensors")
    assert {name: (entry.dtype, entry.shape) for name, entry in files.entries.items()} == {
        name: (value.dtype, tuple(value.shape)) for name, value in values.items()
    }


# Runs


def test_the_runs_of_a_box_are_its_elements_in_order_and_as_few_as_there_can_be() -> None:
    chance = random.Random(0)
    for _ in range(300):
        shape = [chance.randint(1, 4) for _ in range(chance.randint(0, 4))]
        offsets = [chance.randrange(n) for n in shape]
        sizes = [chance.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)]
        numbers = torch.arange(math.prod(shape)).view(shape)
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        expected = numbers[index].flatten().tolist()
        runs = list(runs_of(shape, offsets, sizes))
        assert [i for first, length in runs for i in range(first, first + length)] == expected
        gaps = sum(b != a + 1 for a, b in pairwise(expected))
        assert len(runs) == gaps + 1, (shape, offsets, sizes)


def test_an_empty_box_has_no_runs() -> None:
    for sizes in product((0, 2), (0, 3)):
        if 0 in sizes:
            assert list(runs_of((4, 5), (1, 1), sizes)) == []
