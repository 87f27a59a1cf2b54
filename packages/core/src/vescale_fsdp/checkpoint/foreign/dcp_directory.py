"""Reads directories of torch.distributed.checkpoint (DCP) without running code from them.

The ``.metadata`` file and each item are pickles. They are read by unpicklers that build only the
classes of this format. The metadata are checked: file names must be in the directory, ranges must
be within the files, boxes must tile their tensor. The data have no checksums, so damaged elements
are not detected.

Keys are paths joined by dots: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.step``,
``optimizer.param_groups.0.lr``. The first parts depend on the program that saved::

    model.<fqn>      optimizer.state...    the usual form; `export_dcp` writes it
    app.model.<fqn>  app.optim.state...    objects with state_dict(), as in PyTorch's tutorials
    <fqn>            optimizer.state...    torchtitan
    <fqn>            state.<fqn>.step      states and options flattened, beside the model

States of ``optimizer.state_dict()`` are by number: ``optim.state.0.step``. Their names are those
that the saved groups list (``param_names``), else those of the optimizer that they are loaded into.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.encoding import dtype_name
from vescale_fsdp.checkpoint.files import DataReader, bytes_of, read_regular, size_of
from vescale_fsdp.checkpoint.manifest import (
    DTYPES,
    FILE_NAME,
    Chunk,
    Span,
    TensorEntry,
    boxes_fault,
)
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
)

METADATA = ".metadata"


class StockDirectory:
    """The contents of a directory, by DCP's keys.

    Attributes:
        tensors: the chunks of each tensor. A span holds a pickled tensor and has no CRC32.
        values: the spans of the other items.
        paths: for each key the parts that it was joined from.
        files: the sizes of the data files.
        digest: SHA-256 of the metadata.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / METADATA
        self.tensors: dict[str, TensorEntry] = {}
        self.values: dict[str, Span] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.files: dict[str, int] = {}
        try:
            data = read_regular(self._file, sys.maxsize, pickle.PROTO)
        except OSError as error:
            raise CheckpointIncompleteError(
                f"there is no checkpoint of torch.distributed.checkpoint at {folder}"
            ) from error
        self.digest = hashlib.sha256(data).hexdigest()
        found = self._unpickled(data)
        try:
            self._take(found)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(
                f"{self._file} is refused: it does not have this format ({error})"
            ) from error

    def _unpickled(self, data: bytes) -> Metadata:
        try:
            found = MetadataUnpickler(io.BytesIO(data)).load()
        except _RefusedError as error:
            raise CheckpointCorruptError(
                f"{self._file} is refused: it needs {error}, which is not part of this format and "
                "could run code"
            ) from error
        except Exception as error:  # whatever damaged bytes make it raise
            raise CheckpointCorruptError(f"{self._file} cannot be read: {error!r}") from error
        if type(found) is not Metadata:
            raise CheckpointCorruptError(
                f"{self._file} holds a {type(found).__name__}, expected metadata"
            )
        return found

    def _take(self, found: Metadata) -> None:
        storage: Any = found.storage_data
        paths: Any = found.planner_data or {}
        for key, each in found.state_dict_metadata.items():
            if type(key) is not str:
                raise ValueError(f"the key {key!r} is not text")
            path = tuple(paths.get(key, (key,))) if isinstance(paths, dict) else (key,)
            if any(type(part) not in (str, int) for part in path):
                raise ValueError(f"{key!r} has the path {path!r}")
            self.paths[key] = path
            if isinstance(each, BytesStorageMetadata):
                self.values[key] = self._span(storage[MetadataIndex(key)], key)
            elif isinstance(each, TensorStorageMetadata):
                self.tensors[key] = self._tensor(key, each, storage)
            else:
                raise ValueError(f"{key!r} is a {type(each).__name__}")

    def _tensor(self, key: str, each: TensorStorageMetadata, storage: Any) -> TensorEntry:
        dtype = dtype_name(each.properties.dtype)
        if dtype not in DTYPES:
            raise ValueError(f"{key!r} has the dtype {dtype}")
        shape = _counts(each.size)
        chunks = []
        for chunk in each.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            span = self._span(storage[MetadataIndex(key, offsets)], key)
            chunks.append(Chunk(offsets, sizes, span))
        fault = boxes_fault(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if fault:
            raise ValueError(f"{key!r} of shape {list(shape)} is not whole: {fault}")
        return TensorEntry(dtype, shape, tuple(chunks))

    def _span(self, info: Any, key: str) -> Span:
        file, (offset, length) = info.relative_path, _counts((info.offset, info.length))
        if type(file) is not str or not FILE_NAME.fullmatch(file):
            raise ValueError(f"{file!r} of {key!r} is not the name of a file in this directory")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key!r} is compressed or encrypted, which is not supported")
        if file not in self.files:
            try:
                self.files[file] = size_of(self.folder / file, repr(key))
            except OSError as error:
                raise CheckpointIncompleteError(
                    f"{self.folder / file} is missing; it is needed for {key!r}"
                ) from error
        if offset + length > self.files[file]:
            raise CheckpointCorruptError(
                f"{self.folder / file} has {self.files[file]} bytes, but {key!r} should end at "
                f"byte {offset + length}: it was truncated, or belongs to another checkpoint"
            )
        return Span(file, offset, length, 0)

    # Items

    def chunk(self, reader: DataReader, dtype: str, chunk: Chunk, label: str) -> torch.Tensor:
        """Read the elements of a chunk."""
        found = self._loaded(reader, chunk.span, label)
        if (
            not isinstance(found, torch.Tensor)
            or found.layout is not torch.strided
            or (dtype_name(found.dtype), tuple(found.shape)) != (dtype, chunk.sizes)
        ):
            what = (
                f"{found.dtype} {tuple(found.shape)}"
                if isinstance(found, torch.Tensor)
                else type(found).__name__
            )
            raise CheckpointCorruptError(
                f"{self.folder / chunk.span.file} has a {what} for {label}, expected {dtype} "
                f"{chunk.sizes}"
            )
        return found.detach().contiguous()

    def value(self, reader: DataReader, key: str) -> encoding.Json:
        """Read an item that is not a tensor, as the JSON of `encoding.encode`."""
        found = self._loaded(reader, self.values[key], f"value {key!r}")
        try:
            encoded, tensors = encoding.encode(found, key)
        except CheckpointValueError as error:
            raise CheckpointCorruptError(
                f"{self.folder / self.values[key].file} is refused: {error}"
            ) from error
        if tensors:
            raise CheckpointCorruptError(
                f"{self.folder / self.values[key].file} is refused: {key!r} has tensors within a "
                "pickled value"
            )
        return encoded

    def _loaded(self, reader: DataReader, span: Span, label: str) -> Any:
        data = reader.read_part(span, 0, span.length, label)
        try:
            return torch.load(io.BytesIO(bytes_of(data)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointCorruptError(
                f"{self.folder / span.file} is refused in {label}: it holds more than plain data, "
                "and could run code, or is damaged"
            ) from error
        except Exception as error:  # whatever damaged bytes make it raise
            raise CheckpointCorruptError(
                f"{self.folder / span.file} cannot be read in {label}: {error!r}"
            ) from error


def _counts(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if len(found) > 64 or any(type(n) is not int or not 0 <= n < 2**63 for n in found):
        raise ValueError(f"{found!r} are not counts")
    return found


class _RefusedError(pickle.UnpicklingError):
    """The pickle has a name that is not part of the format."""


class MetadataUnpickler(pickle.Unpickler):
    """Builds only the classes that DCP's metadata consist of."""

    _dtypes = frozenset(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))
    _classes = frozenset(
        (each.__module__, each.__qualname__)
        for module in (metadata, filesystem)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__
        if module is metadata or each.__qualname__ == "_StorageInfo"
    )
    _others = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "Path"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "Path"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle. Raises if it is not part of the format."""
        is_dtype = module == "torch" and name in self._dtypes
        if is_dtype or (module, name) in self._classes or (module, name) in self._others:
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name}")


_MODELS = ("model", "app.model", "state_dict.model", "")
_OPTIMIZERS = ("optimizer", "optim", "app.optimizer", "app.optim")

KeyPath = tuple[str | int, ...]
ByNumber = Callable[[str, list[dict[str, Any]]], dict[Any, str]]


class StockNames:
    """Finds the entries of the model and of the optimizers, and translates their names.

    Args:
        optimizers: the names of the optimizers to find. None: all in the directory.
        model_key: prefix of the model's keys; "" for none. None: detect it.
        optimizer_key: the same for the optimizers.
        strict: raise if an optimizer is missing.
        with_model: find the model.
        by_number: gives the names of parameters that saved groups list by number, from the name of
            the optimizer and these groups. None: without ``param_names`` they keep numbers.

    Attributes:
        tensors: the tensors, by the names that `save` uses.
        texts: the values as JSON, by the names that `save` uses: "model", "optimizer.<name>".
        others: keys that belong to neither the model nor an optimizer.
    """

    def __init__(
        self,
        directory: StockDirectory,
        reader: DataReader,
        optimizers: Iterable[str] | None = None,
        model_key: str | None = None,
        optimizer_key: str | None = None,
        *,
        strict: bool = True,
        with_model: bool = True,
        by_number: ByNumber | None = None,
    ) -> None:
        self._directory, self._reader, self._by_number = directory, reader, by_number
        self.tensors: dict[str, TensorEntry] = {}
        self.texts: dict[str, Any] = {}
        prefixes = _OPTIMIZERS if optimizer_key is None else (optimizer_key,)
        found = self._found(filter(None, prefixes), "")
        what = "model" if with_model else ""
        model = self._found(_MODELS if model_key is None else (model_key,), what, set(found))
        self._names = {".".join(map(str, rest)) for rest in model.values()}
        if not found and not optimizer_key:
            found = self._flattened()
            model = {key: rest for key, rest in model.items() if key not in found}
            self._names -= found.keys()
        self.texts["model"] = {}
        for key, rest in model.items() if with_model else ():
            # Parameters may be in nested dicts; an extra state is one value.
            is_extra = str(rest[0]).endswith("_extra_state")
            path = rest if is_extra else (".".join(map(str, rest)),)
            put(self.texts["model"], path, self._leaf(key, "model", rest))
        wanted = self._optimizers(found) if optimizers is None else list(optimizers)
        for name in wanted:
            tree = self._tree(name, found, wanted)
            if tree["param_groups"]:
                self.texts[f"optimizer.{name}"] = tree
            elif strict:
                raise self._lacks(name)
        known = found.keys() | model.keys()
        self.others = [key for key in directory.paths if key not in known]

    def _found(
        self, candidates: Iterable[str], what: str, taken: Iterable[str] = ()
    ) -> dict[str, KeyPath]:
        """Return the keys under the first prefix that has any, each with its path after that."""
        for prefix in candidates:
            found = {
                key: rest for key in self._directory.paths if (rest := self._rest(key, prefix))
            }
            found = {key: rest for key, rest in found.items() if key not in taken}
            if found:
                return found
        if not what:
            return {}
        tops = sorted({str(path[0]) for path in self._directory.paths.values()})
        raise CheckpointIncompleteError(
            f"{self._directory.folder} has no {what} at {' or '.join(map(repr, candidates))}; its "
            f"entries begin with {tops[:5]}: pass {what}_key="
        )

    def _rest(self, key: str, prefix: str) -> KeyPath:
        path = self._directory.paths[key]
        if not prefix:
            return path if len(path) == 1 and key in self._directory.tensors else ()
        for count in range(1, len(path)):
            if ".".join(map(str, path[:count])) == prefix:
                return path[count:]
        is_flat = len(path) == 1 and key.startswith(prefix + ".")
        return (key[len(prefix) + 1 :],) if is_flat else ()

    def _leaf(self, key: str, item: str, rest: KeyPath) -> encoding.Json:
        if key not in self._directory.tensors:
            return self._directory.value(self._reader, key)
        name = ".".join(map(str, (item, *rest)))
        self.tensors[name] = self._directory.tensors[key]
        return {"$tensor": name}

    # Optimizers

    def _optimizers(self, found: dict[str, KeyPath]) -> list[str]:
        heads = {str(rest[0]).partition(".")[0] for rest in found.values()}
        if heads and not heads & {"state", "param_groups"}:
            return sorted(heads)  # the names of the optimizers
        return ["0"] if heads else []

    def _flattened(self) -> dict[str, KeyPath]:
        """Find ``state.<fqn>.step`` and ``param_groups.<fqn>.lr`` beside the model's entries.

        A name is that of a tensor of the model which has options.
        """
        keys = [key for key, path in self._directory.paths.items() if len(path) == 1]
        paths = {key: self._path((key,)) for key in keys}
        named = {path[1] for path in paths.values() if path[0] == "param_groups" and len(path) == 3}
        heads = ("state", "param_groups")
        return {
            key: (key,)
            for key, path in paths.items()
            if len(path) == 3 and path[0] in heads and path[1] in named
        }

    def _tree(self, name: str, found: dict[str, KeyPath], wanted: list[str]) -> encoding.Json:
        """Return states and options of one optimizer; of all if they are saved merged."""
        mine = {key: rest[1:] for key, rest in found.items() if rest[0] == name}
        paths = {key: self._path(rest) for key, rest in (mine or found).items()}
        paths = {key: path for key, path in paths.items() if len(path) > 2}  # others are not read
        groups: list[Any] = []
        by_name: dict[str, dict[str, Any]] = {}
        for key, path in paths.items():
            if path[0] == "param_groups":
                leaf = self._leaf(key, f"optimizer.{name}", path)
                if isinstance(path[1], str):
                    put(by_name.setdefault(path[1], {"params": [path[1]]}), path[2:], leaf)
                else:
                    put(groups, path[1:], leaf)
        if not mine and len(wanted) > 1 and _numbers(groups):
            raise CheckpointMismatchError(
                f"{self._directory.folder} has the states of one optimizer, by number: pass that "
                f"optimizer, not {len(wanted)}"
            )
        names = self._name_numbers(name, groups)
        tree: dict[str, Any] = {"state": {}, "param_groups": [*groups, *by_name.values()]}
        for key, path in paths.items():
            if path[0] == "state":
                path = ("state", names.get(path[1], path[1]), *path[2:])
                put(tree, path, self._leaf(key, f"optimizer.{name}", path))
        return tree

    def _name_numbers(self, optimizer: str, groups: list[Any]) -> dict[str | int, str]:
        """Put names in place of numbers into groups. Returns the name of each number."""
        numbers = _numbers(groups)
        listed = [each.get("param_names") for each in groups] if numbers else []
        given = [name for each in listed if isinstance(each, list) for name in each]
        if numbers and len(given) == len(numbers) and set(map(str, given)) <= self._names:
            names: dict[Any, str] = dict(zip(numbers, given, strict=True))
        elif numbers and self._by_number is not None:
            names = self._by_number(optimizer, groups)
        else:
            return {}
        for group in groups:
            group["params"] = [names[number] for number in group["params"]]
            group.pop("param_names", None)
        return {str(number): name for number, name in names.items()}

    def _lacks(self, name: str) -> CheckpointIncompleteError:
        return CheckpointIncompleteError(
            f"the checkpoint {self._directory.folder} lacks the optimizer {name!r}; pass "
            "optimizer_key= if its entries begin with another name than 'optimizer'"
        )

    def _path(self, rest: KeyPath) -> KeyPath:
        """Split a path into ("state", parameter, state...) or ("param_groups", number or parameter,
        option...).
        """
        if rest[0] in ("state", "param_groups") and len(rest) > 2:
            return rest
        head, _, text = ".".join(map(str, rest)).partition(".")
        parts = text.split(".")
        for count in range(len(parts) - 1, 0, -1):
            fqn = ".".join(parts[:count])
            if fqn in self._names:
                return head, fqn, ".".join(parts[count:])
        if head == "param_groups" and parts[0].isdecimal():
            return head, int(parts[0]), *parts[1:]
        return rest


def _numbers(groups: list[Any]) -> list[int]:
    """The numbers of parameters in groups; [] if any is a name, or a group has no list of them."""
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    listed = [each for each in lists if isinstance(each, list)]
    found = [number for each in listed for number in each]
    return found if len(listed) == len(lists) and all(type(n) is int for n in found) else []


def put(tree: Any, path: KeyPath, leaf: Any) -> None:
    """Set a leaf in a tree of dicts and lists. Numbers in the path are indices of lists."""
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(part, int):
            if not isinstance(tree, list) or not 0 <= part <= len(tree) + 10_000:
                raise CheckpointCorruptError(f"the path {path} does not match the other paths")
            tree.extend([None] * (part + 1 - len(tree)))
        elif not isinstance(tree, dict):
            raise CheckpointCorruptError(f"the path {path} does not match the other paths")
        if following is None:
            tree[part] = leaf
            return
        inner = tree[part] if isinstance(part, int) else tree.get(part)
        if inner is None:
            inner = tree[part] = [] if isinstance(following, int) else {}
        tree = inner
