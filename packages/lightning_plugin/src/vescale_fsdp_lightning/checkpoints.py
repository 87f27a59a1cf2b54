"""Saves and loads checkpoints of the Trainer. There are three formats:

=========  =====================================================================================
sharded    a sealed directory of `vescale_fsdp.checkpoint`: each process writes its part, all bytes
           have checksums, a load unpickles nothing
full       one file of `torch.save`, as ``DDPStrategy`` writes it: full tensors, gathered one by
           one to the first process
dcp        torch's distributed format and ``meta.pt`` (see `torch_format`)
=========  =====================================================================================

All of them are loaded, and also checkpoints of Lightning's own strategies.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import CheckpointMismatchError, checkpoint
from vescale_fsdp.checkpoint import full
from vescale_fsdp.ranks import everyone
from vescale_fsdp.spi import Weights, unread
from vescale_fsdp.spi import read_manifest as read_sealed
from vescale_fsdp_lightning import torch_format
from vescale_fsdp_lightning.options import Options
from vescale_fsdp_lightning.places import agree, from_first
from vescale_fsdp_lightning.plain import from_plain, to_plain
from vescale_fsdp_lightning.store import Store, is_first

__all__ = [
    "ALSO",
    "Checkpoints",
    "Loading",
    "OptimizerStates",
    "Optimizers",
    "load_sealed",
    "read_manifest",
    "save_sealed",
    "without_states",
]

ALSO = "vescale_fsdp"  # the key in a file for additional optimizers, such as `ShardedEMA`'s

Optimizers = Mapping[str, torch.optim.Optimizer]
Prepare = Callable[[Mapping[str, Any]], None]
WriteFile = Callable[[dict[str, Any], str], None]


class Checkpoints:
    """Saves in the format of the options, and loads any format. All methods are collective."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.store = Store(options.staging_dir)
        self.is_full = options.state_dict_type == "full"

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state for the dictionary that hooks get.

        Tensors are sharded; in the format "full" they are full, in the first process only.
        """
        state = full.model_state(model)
        if not self.is_full:
            return state
        state = full.gathered(state, keep=is_first())
        return state if is_first() else {}

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state for the dictionary that hooks get.

        Tensors are sharded; in the format "full" they are full, in the first process only.
        """
        if not self.is_full:
            return optimizer.state_dict()
        named = full.optimizer_state(model, optimizer)
        named = full.gathered(named, keep=is_first())
        return full.by_number(named) if is_first() else {}

    def save(
        self,
        path: str,
        values: dict[str, Any],
        model: nn.Module,
        optimizers: Optimizers,
        write_file: WriteFile | None = None,
    ) -> None:
        """Save. After an error or a kill there is no incomplete checkpoint at ``path``.

        Args:
            values: the dictionary that Lightning has collected.
            optimizers: by names. The names of the Trainer's own optimizers are numbers.
            write_file: writes a full checkpoint. Default: ``torch.save``.

        Raises:
            CheckpointValueError: the dictionary has a value that the format cannot store.
            CheckpointWriteError, OSError: it could not be written.
        """
        if self.is_full:
            self._save_full(path, values, model, optimizers, write_file)
            return
        rest = without_states(values)
        weights = values.get("state_dict")  # hooks may have changed it
        if weights is None:
            weights = full.model_state(model)
        if self.options.state_dict_type == "dcp":
            state = {"model": weights}
            for name, each in optimizers.items():
                state[f"optimizer_{name}"] = full.optimizer_state(model, each)
            self.store.publish(path, lambda target, _: torch_format.save(target, state, rest))
            return
        step = rest.get("global_step")
        self.store.publish(
            path,
            lambda target, may_wait: save_sealed(
                target,
                model,
                optimizers,
                rest,
                self.options,
                step=step,
                may_wait=may_wait,
                weights=weights,
            ),
        )

    def _save_full(
        self,
        path: str,
        values: dict[str, Any],
        model: nn.Module,
        optimizers: Optimizers,
        write_file: WriteFile | None,
    ) -> None:
        also = {
            name: self.optimizer_state(model, each)
            for name, each in optimizers.items()
            if not name.isdecimal()
        }
        if also:
            values[ALSO] = also
        if write_file is None:
            self.store.publish_file(path, lambda stream: torch.save(values, stream))
        else:
            from_first(lambda: write_file(values, path))

    def open(self, path: str, *, weights_only: bool | None, local_rank: int = 0) -> Loading:
        """Open a checkpoint in any of the formats that `save` writes, or of Lightning's strategies.

        Raises:
            CheckpointIncompleteError: there is no complete checkpoint at ``path``.
            CheckpointCorruptError: bytes differ from those that were saved.
        """
        only = self.options.weights_only if weights_only is None else weights_only
        stack = contextlib.ExitStack()
        found = stack.enter_context(self.store.fetch(path, local_rank))
        try:
            if found.is_file():
                return _File(found, stack, only)
            if (found / torch_format.METADATA).is_file():
                return _Directory(found, stack, only)
            return _Sealed(found, stack)
        except BaseException:
            stack.close()
            raise


class Loading:
    """A checkpoint that is open, from the first look at its values to the load of its tensors.

    Between both the hooks of the user may change ``values["state_dict"]``, whose tensors are read
    when they are needed, and remove or empty ``values["optimizer_states"]``.

    Attributes:
        values: Lightning's dictionary. Sharded states of optimizers are `OptimizerStates` in it.
        copy: has the local copy of a checkpoint on another file system, until it is closed.
            Collective.
    """

    values: dict[str, Any]

    def __init__(self, path: Path, copy: contextlib.ExitStack) -> None:
        self.path, self.copy = path, copy

    def _hand_out(self, num_optimizers: int, saved: Mapping[str, str]) -> None:
        """Complete ``values`` for hooks, and remember what the state dict has under each name."""
        if num_optimizers:
            self.values["optimizer_states"] = [OptimizerStates() for _ in range(num_optimizers)]
        self._saved = saved

    def load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        values: Mapping[str, Any],
        *,
        strict: bool,
        prepare: Prepare | None = None,
    ) -> None:
        """Load model and optimizers in place. Collective. Saved by any number of processes.

        If the checkpoint has only weights, the optimizers do not change. Neither do those of the
        Trainer if hooks have removed or emptied their states.

        Args:
            values: those of this object, as hooks have left them.
            prepare: called with the other values, before optimizers are loaded.

        Raises:
            CheckpointCorruptError: bytes differ from those that were saved.
            CheckpointMismatchError: it is of another model.
            RankMismatchError: hooks have left different values on the ranks.
        """
        state = values["state_dict"]
        with_optimizers = bool(values.get("optimizer_states"))
        self._check_same(state, with_optimizers, model)
        if not with_optimizers:
            optimizers = {n: each for n, each in optimizers.items() if not n.isdecimal()}
        is_own = type(model).load_state_dict is not nn.Module.load_state_dict
        if is_own:  # may change the state dict too, and has to see all of it
            agree(lambda: model.load_state_dict(dict(state), strict=strict))
        self._load(model, optimizers, None if is_own else state, strict, prepare)

    def _check_same(
        self, state: Mapping[str, Any], with_optimizers: bool, model: nn.Module
    ) -> None:
        def described() -> dict[str, str | None]:
            found = unread.changes(state, full.model_state(model), self._saved, self._key_of)
            return {**found, "optimizer_states": "is kept" if with_optimizers else "is empty"}

        def compared(found: list[Any]) -> list[Any]:
            unread.check_same(found)
            return [None] * len(found)

        everyone().together(f"the load of {self.path}", described, compared)

    def _key_of(self, entry: Any) -> str | None:
        """The key in the checkpoint of an entry that has not changed; else None."""
        return unread.key_of(entry)

    def _load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        state: Mapping[str, Any] | None,
        strict: bool,
        prepare: Prepare | None,
    ) -> None:
        """Load. If ``state`` is None, only the optimizers."""
        raise NotImplementedError


class OptimizerStates(dict[str, Any]):
    """Stands for the state of one optimizer, which each rank reads by itself."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r}: on_load_checkpoint sees that there is a state of an optimizer, and may "
            'remove or empty checkpoint["optimizer_states"]. Change what is in it when it is '
            "loaded, in on_train_start: trainer.optimizers"
        )


def without_states(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary without the states of model and optimizers, which are saved apart."""
    dropped = ("state_dict", "optimizer_states")
    return {key: value for key, value in values.items() if key not in dropped}


def save_sealed(
    target: Path,
    model: nn.Module,
    optimizers: Optimizers,
    rest: Mapping[str, Any],
    options: Options,
    *,
    step: Any = None,
    may_wait: bool = False,
    models: Sequence[str] = (),
    weights: Weights = "all",
) -> checkpoint.SaveHandle | None:
    """Write a sealed directory. Collective. Returns a handle if it is written in the background.

    Args:
        models: Fabric: the user's keys of the models, whose gradients have been checked.
        weights: as of `vescale_fsdp.checkpoint.save`.
    """
    extra: dict[str, Any] = {"models": list(models)} if models else {}
    agree(lambda: extra.update(lightning=to_plain(rest)))  # hooks may differ between ranks
    if not models and (pretrained := pretrained_in(model)):
        extra["safetensors_prefix"] = f"{pretrained}."
    if type(step) is int:
        extra["step"] = step
    is_async = may_wait and options.async_save
    handle = checkpoint.save(
        target,
        model,
        optimizers or None,
        extra=extra,
        rng=options.save_rng and bool(optimizers),
        async_=is_async,
        weights=weights,
        reduced_by_hand=bool(models),
    )
    return handle if is_async else None


def pretrained_in(model: nn.Module) -> str | None:
    """Return the attribute of ``model`` that is a model of ``transformers``, if there is one only.

    ``from_pretrained`` loads the tensors of that one, by names without the attribute's.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or isinstance(model, transformers.PreTrainedModel):
        return None
    found = [
        name
        for name, child in model.named_children()
        if isinstance(child, transformers.PreTrainedModel)
    ]
    return found[0] if len(found) == 1 else None


def load_sealed(
    path: Path,
    model: nn.Module,
    optimizers: Optimizers,
    strict: bool,
    *,
    rng: bool,
    prepare: Prepare | None = None,
    weights: Weights = "all",
) -> dict[str, Any]:
    """Load a sealed directory in place. Returns the other values. Collective.

    Args:
        rng: restore the random number generators of this process.
        prepare: as in `Loading.load`.
        weights: as of `vescale_fsdp.checkpoint.load`.
    """
    values = read_manifest(path).values
    saved = [name.removeprefix("optimizer.") for name in values if name.startswith("optimizer.")]
    check_count(saved, optimizers, path)
    if prepare is not None and saved:
        agree(lambda: prepare(from_plain(checkpoint.read_extra(path).get("lightning", {}))))
    there = {name: each for name, each in optimizers.items() if name in saved}
    extra = checkpoint.load(path, model, there or None, strict=strict, rng=rng, weights=weights)
    rest: dict[str, Any] = from_plain(extra.get("lightning", extra))
    return rest


def check_count(saved: Iterable[str], optimizers: Optimizers, path: Path) -> None:
    """Raise if the number of the Trainer's optimizers differs from the saved number.

    Raises:
        CheckpointMismatchError: names both numbers.
    """
    of_trainer = sum(name.isdecimal() for name in saved)
    made = sum(name.isdecimal() for name in optimizers)
    if of_trainer and made and of_trainer != made:
        raise CheckpointMismatchError(
            f"{path} has the states of {of_trainer} optimizer{'s' * (of_trainer > 1)}, and "
            f"configure_optimizers has made {made}; make as many as when it was saved"
        )


def read_manifest(path: Path) -> checkpoint.Manifest:
    """Read the manifest of a sealed directory. Collective."""
    found: list[checkpoint.Manifest] = []
    agree(lambda: found.append(read_sealed(path)))
    return found[0]


def _is_of_trainer(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdecimal()


def _keys(state: Mapping[str, Any]) -> dict[str, str]:
    found = {name: unread.key_of(each) for name, each in state.items()}
    return {name: key for name, key in found.items() if key is not None}


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


class _Sealed(Loading):
    def __init__(self, path: Path, copy: contextlib.ExitStack) -> None:
        super().__init__(path, copy)

        def read() -> None:
            extra = checkpoint.read_extra(path)
            self.values = from_plain(extra.get("lightning", extra))
            state = self.values["state_dict"] = checkpoint.unread_state(path)
            saved = read_sealed(path).values
            of_trainer = [name for name in saved if _is_of_trainer(name, "optimizer.")]
            self._hand_out(len(of_trainer), _keys(state))

        agree(read)

    def _load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        state: Mapping[str, Any] | None,
        strict: bool,
        prepare: Prepare | None,
    ) -> None:
        weights: Weights = "none" if state is None else state
        rng = any(name.isdecimal() for name in optimizers)  # resumed; not only `ShardedEMA`'s
        load_sealed(self.path, model, optimizers, strict, rng=rng, prepare=prepare, weights=weights)


class _Directory(Loading):
    def __init__(self, path: Path, copy: contextlib.ExitStack, weights_only: bool) -> None:
        super().__init__(path, copy)
        self._directory = torch_format.Directory(path)
        self.values = self._directory.values(weights_only)
        key = self._directory.first_of(("model", "state_dict"))
        state = self.values["state_dict"] = self._directory.unread_state(key)
        of_trainer = [name for name in self._directory.keys if _is_of_trainer(name, "optimizer_")]
        self._hand_out(len(of_trainer), _keys(state))

    def _load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        state: Mapping[str, Any] | None,
        strict: bool,
        prepare: Prepare | None,
    ) -> None:
        directory = self._directory
        saved = [key.removeprefix("optimizer_") for key in directory.keys]
        check_count(saved, optimizers, self.path)
        if prepare is not None and saved:
            agree(lambda: prepare(self.values))
        if state is not None:
            directory.load_state(state, model, strict=strict)
        for name, each in optimizers.items():
            if directory.has(f"optimizer_{name}"):
                directory.load_optimizer(f"optimizer_{name}", model, each)


class _File(Loading):
    def __init__(self, path: Path, copy: contextlib.ExitStack, weights_only: bool) -> None:
        super().__init__(path, copy)

        def read() -> None:
            self.values = torch_format.read_file(path, weights_only)
            self._own = self.values.pop("optimizer_states", [])
            self._also = self.values.pop(ALSO, {})
            # Held, so that other tensors get other ids.
            self._state = dict(self.values["state_dict"])
            self._known = {
                id(each): (name, _version_of(each)) for name, each in self._state.items()
            }
            self._hand_out(len(self._own), {name: name for name in self._state})

        agree(read)

    def _key_of(self, entry: Any) -> str | None:
        name, version = self._known.get(id(entry), (None, None))
        return name if version == _version_of(entry) else None

    def _load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        state: Mapping[str, Any] | None,
        strict: bool,
        prepare: Prepare | None,
    ) -> None:
        def load() -> None:
            check_count(map(str, range(len(self._own))), optimizers, self.path)
            if prepare is not None and self._own:
                prepare(self.values)
            if state is not None:
                full.load_model(model, state, strict=strict)
            for name, each in optimizers.items():
                is_own = name.isdecimal() and self._own
                saved = self._own[int(name)] if is_own else self._also.get(name)
                if saved is not None:
                    full.load_optimizer(model, each, saved)

        agree(load)
