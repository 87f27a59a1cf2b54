"""The entries of a DCP directory by the names that `save` gives them.

DCP's keys say neither where a parameter's name ends nor which keys are the model's. The paths that
DCP keeps beside them do, or the parameters' names, which the model's keys are::

    optimizer.state.layers.0.weight.exp_avg   ->  optimizer.0.state.layers.0.weight.exp_avg
                                                  {"state": {"layers.0.weight": {"exp_avg": ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vescale_fsdp.checkpoint.dcp.directory import StockDirectory
from vescale_fsdp.checkpoint.disk.files import DataReader
from vescale_fsdp.checkpoint.disk.manifest import TensorEntry
from vescale_fsdp.checkpoint.state import values
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

_MODELS = ("model", "app.model", "state_dict.model", "")
_OPTIMIZERS = ("optimizer", "optim", "app.optimizer", "app.optim")

Path = tuple[str | int, ...]


class StockNames:
    """Which entries are the model's, which the optimizers', and by what names.

    Args:
        optimizers: the names of those that are wanted; None for all that are there.
        model_key: what the model's keys begin with; "" if with nothing. None: look for it.
        optimizer_key: the same for the optimizers.
        strict: refuse a directory without a wanted optimizer.
        with_model: there is a model, and it is wanted.

    Attributes:
        tensors: by the names of `save`.
        texts: JSON of the values, by the names of `save`: "model", "optimizer.<name>".
        others: keys of what is neither the model's nor an optimizer's.

    Raises:
        CheckpointIncompleteError: the model or a wanted optimizer is not found.
        CheckpointCorruptError: an item is more than plain data.
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
    ) -> None:
        self._directory, self._reader = directory, reader
        self.tensors: dict[str, TensorEntry] = {}
        self.texts: dict[str, Any] = {}
        found = self._found(_OPTIMIZERS if optimizer_key is None else (optimizer_key,), "")
        taken = set(found)
        model: dict[str, Path] = {}
        if with_model:
            model = self._found(_MODELS if model_key is None else (model_key,), "model", taken)
        self._names = {".".join(map(str, rest)) for rest in model.values()}
        self.texts["model"] = {}
        for key, rest in model.items():
            # Parameters may be in nested dicts; an extra state is one value.
            is_extra = str(rest[0]).endswith("_extra_state")
            path = rest if is_extra else (".".join(map(str, rest)),)
            put(self.texts["model"], path, self._leaf(key, "model", rest))
        for name in self._optimizers(found) if optimizers is None else optimizers:
            tree = self._tree(name, found)
            if tree["param_groups"]:
                self.texts[f"optimizer.{name}"] = tree
            elif strict:
                raise self._lacks(name)
        known = taken | set(model)
        self.others = [key for key in directory.paths if key not in known]

    def _found(
        self, candidates: Iterable[str], what: str, taken: Iterable[str] = ()
    ) -> dict[str, Path]:
        """The keys under the first candidate that has some, each with the rest of its path."""
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

    def _rest(self, key: str, prefix: str) -> Path:
        path = self._directory.paths[key]
        if not prefix:
            return path if len(path) == 1 and key in self._directory.tensors else ()
        for count in range(1, len(path)):
            if ".".join(map(str, path[:count])) == prefix:
                return path[count:]
        is_flat = len(path) == 1 and key.startswith(prefix + ".")
        return (key[len(prefix) + 1 :],) if is_flat else ()

    def _leaf(self, key: str, item: str, rest: Path) -> values.Json:
        if key not in self._directory.tensors:
            return self._directory.value(self._reader, key)
        name = ".".join(map(str, (item, *rest)))
        self.tensors[name] = self._directory.tensors[key]
        return {"$tensor": name}

    # Optimizers

    def _optimizers(self, found: dict[str, Path]) -> list[str]:
        heads = {str(rest[0]).partition(".")[0] for rest in found.values()}
        if heads and not heads & {"state", "param_groups"}:
            return sorted(heads)  # each optimizer by its name
        return ["0"] if heads else []

    def _tree(self, name: str, found: dict[str, Path]) -> values.Json:
        """States and options of one optimizer. Where they are not apart, those of all."""
        mine = {key: rest[1:] for key, rest in found.items() if rest[0] == name}
        tree: dict[str, Any] = {"state": {}, "param_groups": []}
        by_name: dict[str, dict[str, Any]] = {}
        for key, rest in (mine or found).items():
            path = self._path(rest)
            if path[0] not in tree or len(path) < 3:
                continue  # of another optimizer, or a value of its own
            leaf = self._leaf(key, f"optimizer.{name}", path)
            if path[0] == "param_groups" and type(path[1]) is str:
                group = by_name.setdefault(path[1], {"params": [path[1]]})
                put(group, path[2:], leaf)
            else:
                put(tree, path, leaf)
        tree["param_groups"] += by_name.values()
        return tree

    def _lacks(self, name: str) -> CheckpointIncompleteError:
        return CheckpointIncompleteError(
            f"the checkpoint {self._directory.folder} lacks the optimizer {name!r}; pass "
            "optimizer_key= if its entries begin with another name than 'optimizer'"
        )

    def _path(self, rest: Path) -> Path:
        """("state", parameter, state...), or ("param_groups", number or parameter, option)."""
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


def put(tree: Any, path: Path, leaf: Any) -> None:
    """Set a leaf of a tree of objects and lists; numbers are places in lists."""
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(part, int):
            if not isinstance(tree, list) or not 0 <= part <= len(tree) + 10_000:
                raise CheckpointCorruptError(f"the path {path} does not fit its neighbours")
            tree.extend([None] * (part + 1 - len(tree)))
        elif not isinstance(tree, dict):
            raise CheckpointCorruptError(f"the path {path} does not fit its neighbours")
        if following is None:
            tree[part] = leaf
            return
        inner = tree[part] if isinstance(part, int) else tree.get(part)
        if inner is None:
            inner = tree[part] = [] if isinstance(following, int) else {}
        tree = inner
