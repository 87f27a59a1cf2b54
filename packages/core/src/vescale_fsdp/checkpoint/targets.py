"""Targets: the objects that a load fills, such as the model, optimizers and schedulers.

A target compares an object with the manifest, and lists the tensors to fill. It changes nothing
yet, except that it makes optimizer states that are missing. When the tensors are filled, ``apply``
sets all other values by the object's ``load_state_dict``. ``undo`` reverts that.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale_fsdp import compat
from vescale_fsdp.checkpoint import contents, encoding, full
from vescale_fsdp.checkpoint.contents import Stateful, Weights, read_stateful, weights_of
from vescale_fsdp.checkpoint.manifest import DTYPES, Manifest
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer, Snapshot
from vescale_fsdp.checkpoint.unread import UnreadTensor, changes, read_all
from vescale_fsdp.engine import ErrorFeedback, Residuals, blank_tensors
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
)

_EXTRA = "_extra_state"  # the last part of torch's name for a module's extra state
_log = logging.getLogger(__name__)


class Target:
    """One object to load.

    Attributes:
        live: tensors of the object itself, by name. On failure their old elements are restored.
        fresh: new tensors to fill, by name.
        changed: this rank's parts of tensors of the object, with the values to fill them with.
    """

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.Tensor] = {}
        self.changed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self) -> None:
        """Set the object's other values. Called after the tensors are filled."""

    def undo(self) -> None:
        """Revert `apply`. Called after ``live`` has its old elements again."""


class Saved:
    """The contents of a checkpoint, as this rank needs them.

    Args:
        texts: for each value its variants: the ranks that saved it, and the JSON.
    """

    def __init__(
        self,
        place: str,
        manifest: Manifest,
        texts: Mapping[str, list[tuple[tuple[int, ...], Any]]],
        rank: int,
        strict: bool,
    ) -> None:
        self.place, self.manifest, self.rank, self.strict = place, manifest, rank, strict
        self.texts = texts

    def variants(self, name: str) -> list[Any]:
        """Return all variants of a value, as JSON."""
        return [text for _, text in self.texts.get(name, [])]

    def own(self, name: str) -> tuple[Any, str] | None:
        """Return this rank's variant of a value, and the suffix of the names of its tensors.

        If there is only one variant, every rank gets it. None: this rank saved no such value.
        """
        variants = self.texts.get(name, [])
        for ranks, text in variants:
            if len(variants) == 1 or self.rank in ranks:
                return text, f"@{ranks[0]}" if len(variants) > 1 else ""
        return None

    def lacks(self, names: list[str]) -> CheckpointIncompleteError:
        """Return the error for missing entries."""
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return CheckpointIncompleteError(
            f"the checkpoint {self.place} lacks {len(names)} entries: {shown}. Load it into the "
            "model and optimizers it was saved from, or pass strict=False"
        )

    def check_form(self, name: str, text: Any, parts: Mapping[str, type]) -> None:
        """Raise unless a JSON value is an object that has these keys with these types."""
        is_object = isinstance(text, dict)
        if not is_object or any(type(text.get(part)) is not kind for part, kind in parts.items()):
            raise CheckpointCorruptError(
                f"{name!r} of the checkpoint {self.place} is refused: expected an object with "
                f"{sorted(parts)}, found {str(text)[:60]!r}"
            )

    def check_shape(self, name: str, tensor: torch.Tensor) -> None:
        """Raise unless a tensor has the saved shape and can be written to."""
        encoding.check(tensor, name)
        shape = self.manifest.tensors[name].shape
        if tuple(tensor.shape) != shape:
            raise CheckpointMismatchError(
                f"{name!r} has shape {list(shape)} in the checkpoint {self.place}, and "
                f"{list(tensor.shape)} here; load it into the model it was saved from"
            )
        local = compat.local_tensor(tensor)
        if any(n > 1 and not step for n, step in zip(local.shape, local.stride(), strict=True)):
            raise CheckpointMismatchError(
                f"{name!r} is expanded here: its elements share memory, and cannot be filled. Make "
                "it with .clone() after .expand()"
            )

    def new_tensor(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Make a tensor to fill: sharded as ``like``, or a full one in host memory."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise self.lacks([name])
        if isinstance(like, DTensor):
            self.check_shape(name, like)
            return torch.zeros_like(like)
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])


class ModelTarget(Target):
    """Parameters, buffers and extra states of a model.

    Args:
        tensors_only: the format has no extra states. Those of the model do not change.
        weights: which part of the model is loaded, or the state dict to load.

    Attributes:
        names: the names of all tensors that the model saves.
        lacking: names that the checkpoint does not have. Of tied names one is enough.
        blank: the tensors in ``live`` that have had no values since ``to_empty``.
        changes: what was changed in the state dict to load. The same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        saved: Saved,
        *,
        tensors_only: bool = False,
        weights: Weights = "all",
    ) -> None:
        self._model, self._saved = model, saved
        given = None if isinstance(weights, str) else weights
        self._strict = saved.strict and (given is not None or weights == "all")
        self._state = weights_of(model, weights if given is None else "all")
        super().__init__()
        self.changes: dict[str, str | None] = {}
        if given is not None:
            of_model = (key for key in saved.manifest.tensors if key.startswith("model."))
            keys_saved = {key.removeprefix("model."): key for key in of_model}
            self.changes = changes(given, self._state, keys_saved)
        self._before: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for variant in saved.variants("model"):
            saved.check_form("model", variant, {})
            merged |= variant
        self.names: set[str] = set()
        lacking = []
        ties = encoding.ties_of(model)
        filled: dict[str, torch.Tensor] = {}  # a tensor with several names is filled once
        keys: dict[str, str] = {}  # in `live` and `changed`, by the model's names
        # Of the entries for a tensor with several names the last counts, as in `load_state_dict`.
        last = {ties.get(fqn, fqn): fqn for fqn in self._state if fqn in (given or ())}
        for fqn, value in self._state.items():
            name = f"model.{fqn}"
            # The result of get_extra_state() may have another form before the first step.
            is_extra = fqn.rpartition(".")[2] == _EXTRA and not isinstance(value, DTensor)
            if not isinstance(value, torch.Tensor) or (is_extra and not tensors_only):
                if fqn in (merged if given is None else given):
                    self._before[fqn] = copy.deepcopy(value)
                    if given is None:
                        self._extra(fqn, merged[fqn], value)
                    else:
                        self._state[fqn] = read_all(given[fqn])
                elif not tensors_only:
                    lacking.append(fqn)
                continue
            self.names.add(name)
            if given is not None and fqn in given:
                if last[ties.get(fqn, fqn)] == fqn:
                    keys[fqn] = self._take(fqn, value, given[fqn])
                    filled[ties.get(fqn, fqn)] = value
            elif given is None and name in saved.manifest.tensors:
                saved.check_shape(name, value)
                if ties.get(fqn, fqn) not in filled:
                    self.live[name] = filled[ties.get(fqn, fqn)] = value
                    keys[fqn] = name
            else:
                lacking.append(fqn)
        for fqn in {*ties, *ties.values()} & self._state.keys():  # hooks may copy for each name
            self._state[fqn] = filled.get(ties.get(fqn, fqn), self._state[fqn])
        self.lacking = [f"model.{fqn}" for fqn in lacking if ties.get(fqn, fqn) not in filled]
        if self.lacking and saved.strict:
            raise saved.lacks(self.lacking)
        blank = blank_tensors(model)
        filled_by_this = {id(blank[fqn]) for fqn in blank if fqn in keys}
        self.blank = {keys[fqn]: t for fqn, t in blank.items() if fqn in keys}
        self._left = [fqn for fqn, t in blank.items() if id(t) not in filled_by_this]
        if self._strict:
            self.check_filled()
            known = self._state.keys() | merged.keys()
            if added := sorted(set(given or ()) - known):
                raise CheckpointMismatchError(
                    f"{len(added)} entries were added to the state dict of {saved.place}, and the "
                    f"model does not have them: {', '.join(added[:5])}. Rename or drop them, or "
                    "pass strict=False"
                )

    def _take(self, fqn: str, own: torch.Tensor, entry: Any) -> str:
        """Fill a tensor of the model from an entry of a state dict. Returns the key.

        An entry that nobody has read is read as without a state dict: only this rank's part.
        """
        saved, is_unread = self._saved, isinstance(entry, UnreadTensor) and not entry.is_read
        if is_unread and entry.place == saved.place and entry.key not in self.live:
            saved.check_shape(entry.key, own)
            self.live[entry.key] = own
            return str(entry.key)
        value = read_all(entry)
        if not isinstance(value, torch.Tensor):
            raise CheckpointMismatchError(
                f"{fqn!r} of the state dict is a {type(value).__name__}, expected a tensor of "
                f"shape {tuple(own.shape)}"
            )
        with torch.no_grad():
            part = full.part_of(value, own, fqn)
            # A copy, because what is loaded and what was there change places. On the host, as what
            # is read from files: the device need not hold the model twice.
            copied = compat.local_tensor(part).detach().to("cpu", copy=True)
            pair = compat.local_tensor(own), copied
        self.changed[f"changed {fqn}"] = pair
        return f"changed {fqn}"

    def check_filled(self) -> None:
        """Raise if a tensor of the model has had no values since ``to_empty`` and gets none."""
        if self._left:
            shown = ", ".join(self._left[:5]) + (", ..." if len(self._left) > 5 else "")
            raise CheckpointIncompleteError(
                f"{len(self._left)} tensors of the model have no values since to_empty(), and the "
                f"checkpoint {self._saved.place} has none for them: {shown}. Compute buffers that "
                "are not saved, such as rotary frequencies, before the load: call "
                "reset_parameters() of their modules or, in transformers, "
                "model._init_weights(module). Or pass strict=False"
            )

    def _extra(self, fqn: str, text: Any, own: Any) -> None:
        device = own.device if isinstance(own, torch.Tensor) else None

        def tensor_of(name: str) -> torch.Tensor:
            return self.fresh.setdefault(name, self._saved.new_tensor(name).to(device))

        self._state[fqn] = encoding.decode(text, tensor_of, f"model.{fqn}")

    def apply(self) -> None:
        """Run ``load_state_dict``. Tensors are filled; this sets extra states and runs hooks."""
        options = StateDictOptions(strict=self._strict)
        set_model_state_dict(self._model, dict(self._state), options=options)

    def undo(self) -> None:
        """Run ``load_state_dict`` with the old values."""
        self._state |= self._before
        set_model_state_dict(self._model, dict(self._state), options=StateDictOptions(strict=False))


class OptimizerTarget(Target):
    """States and options of an optimizer.

    Attributes:
        params: the optimizer's parameters, by name.
        saved_params: names of the model's parameters that the saved optimizer had.
    """

    def __init__(self, name: str, optimizer: Optimizer, model: nn.Module, saved: Saved) -> None:
        super().__init__()
        self._saved, self._key = saved, f"optimizer.{name}"
        self._snapshot = Snapshot(optimizer)
        self._named = NamedOptimizer(name, optimizer, model)
        self.params, self.saved_params = self._named.params, set[str]()
        self._state: dict[str, Any] = {}
        variants = saved.variants(self._key)
        self.is_there = bool(variants)
        if not variants:
            if saved.strict:
                raise saved.lacks([self._key])
            return
        states: dict[str, Any] = {}
        groups: list[Any] = []
        for variant in variants:
            saved.check_form(self._key, variant, {"state": dict, "param_groups": list})
            for each in variant["state"].values():
                saved.check_form(self._key, each, {})
            for each in variant["param_groups"]:
                saved.check_form(self._key, each, {"params": list})
            states = {**variant["state"], **states}
            groups += variant["param_groups"]
        self._groups = encoding.decode(groups, self._new, self._key)
        listed = {n for group in self._groups for n in group["params"] if isinstance(n, str)}
        self.saved_params = listed & self._named.of_model
        self._named.check(self._groups, saved.strict)
        try:
            made = self._named.make_states(states)
            self._make_targets(states, {self._name(*each) for each in made})
        except BaseException:
            self._snapshot.restore()
            raise

    def _name(self, fqn: str, key: str) -> str:
        return f"{self._key}.state.{fqn}.{key}"

    def _new(self, name: str) -> torch.Tensor:
        return self.fresh.setdefault(name, self._saved.new_tensor(name))

    def _make_targets(self, states: dict[str, Any], made: set[str]) -> None:
        """Find the optimizer's tensor for each saved one."""
        own = self._named.tree()["state"]
        _, there = encoding.encode({"state": own}, self._key)
        used: set[str] = set()
        for fqn, text in states.items():
            if fqn not in self._named.params and fqn not in own:
                continue  # this rank or this model does not have the parameter
            self._state[fqn] = encoding.decode(text, self._find(there, made, used), self._key)
            for key in own.get(fqn, {}).keys() - self._state[fqn].keys():
                self._state[fqn][key] = own[fqn][key]
                used |= self._lacking(fqn, key, there)
        lacking = sorted(
            name
            for name in there
            if name not in used and any(name.startswith(self._name(fqn, "")) for fqn in self._state)
        )
        if lacking and self._saved.strict:
            raise self._saved.lacks(lacking)

    def _lacking(self, fqn: str, key: str, there: Mapping[str, torch.Tensor]) -> set[str]:
        """Raise, if strict, because a state was not saved. Else return its tensors' names."""
        if self._saved.strict:
            raise self._saved.lacks([self._name(fqn, key)])
        return {name for name in there if name.startswith(self._name(fqn, key))}

    def _find(
        self, there: Mapping[str, torch.Tensor], made: set[str], used: set[str]
    ) -> Callable[[str], torch.Tensor]:
        def find(name: str) -> torch.Tensor:
            tensor = there.get(name)
            if tensor is None:
                if self._saved.strict:
                    raise CheckpointMismatchError(
                        f"the checkpoint {self._saved.place} has {name!r}, a state that this "
                        f"{type(self._named.optimizer).__name__} does not make in its first step; "
                        "load it into the kind of optimizer it was saved from, with the same "
                        "options, or take as many steps with it before the load"
                    )
                return self._new(name)
            if name not in self._saved.manifest.tensors:
                raise self._saved.lacks([name])
            self._saved.check_shape(name, tensor)
            used.add(name)
            (self.fresh if name in made else self.live)[name] = tensor
            return tensor

        return find

    def apply(self) -> None:
        """Run the optimizer's ``load_state_dict`` with its own tensors, which are filled."""
        if self.is_there:
            self._named.load(self._state, self._groups, self._saved.strict)

    def undo(self) -> None:
        """Remove the states that were made, and restore values and options."""
        self._snapshot.restore()


def optimizer_targets(
    optimizers: Mapping[str, Optimizer], model: nn.Module, saved: Saved
) -> list[OptimizerTarget]:
    """Make the targets of all optimizers.

    Raises, if strict, when a saved state belongs to a parameter of the model that is in no
    optimizer.
    """
    made: list[OptimizerTarget] = []
    try:
        made += [OptimizerTarget(name, each, model, saved) for name, each in optimizers.items()]
        taken = {fqn for each in made for fqn in each.params}
        left = sorted({fqn for each in made for fqn in each.saved_params} - taken)
        if left and saved.strict:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise CheckpointMismatchError(
                f"the checkpoint {saved.place} has optimizer states of {len(left)} parameters of "
                f"the model that are in no optimizer here ({shown}); build the optimizer with the "
                "parameters it was saved with, in all of its groups, or pass strict=False to drop "
                "these states"
            )
    except BaseException:
        for each in made:
            each.undo()
        raise
    return made


class StatefulTarget(Target):
    """An object with this rank's own state: a scheduler, a data loader."""

    def __init__(self, name: str, other: Stateful, saved: Saved) -> None:
        super().__init__()
        self._other, self._state = other, None
        key = f"stateful.{name}"
        found = saved.own(key)
        if found is None:
            if not saved.strict:
                return
            if not saved.variants(key):
                raise saved.lacks([key])
            raise CheckpointMismatchError(
                f"{key} differs between the {saved.manifest.world_size} ranks that saved "
                f"{saved.place}, and rank {saved.rank} was not among them. Load it on as many "
                "ranks, or leave it out and set it for this number of ranks"
            )
        self._before = copy.deepcopy(read_stateful(name, other))
        _, there = encoding.encode(self._before, key)
        text, suffix = found

        def tensor_of(name: str) -> torch.Tensor:
            own = name + suffix if name + suffix in saved.manifest.tensors else name
            return self.fresh.setdefault(own, saved.new_tensor(own, there.get(name)))

        self._state = encoding.decode(text, tensor_of, key)

    def apply(self) -> None:
        """Run ``load_state_dict``."""
        if self._state is not None:
            self._other.load_state_dict(self._state)

    def undo(self) -> None:
        """Run ``load_state_dict`` with the old state."""
        if self._state is not None:
            self._other.load_state_dict(self._before)


class ValueTarget(Target):
    """A value that the load returns."""

    def __init__(self, name: str, saved: Saved) -> None:
        super().__init__()
        found = saved.own(name)

        def tensor_of(key: str) -> torch.Tensor:
            return self.fresh.setdefault(key + suffix, saved.new_tensor(key + suffix))

        text, suffix = found or (None, "")
        self.value = encoding.decode(text, tensor_of, name)


class FeedbackTarget(Target):
    """The error feedback of this rank's gradients.

    It is loaded only if it fits: the same number of ranks, the same parts of the parameters. Else
    error feedback starts from zero, and the log says so.

    Args:
        model: the model of the optimizers.
        num_ranks: the number of ranks that load.
    """

    def __init__(self, model: nn.Module, saved: Saved, num_ranks: int) -> None:
        super().__init__()
        self._feedback, self._saved = ErrorFeedback(model), saved
        self._before: list[Residuals] | None = None
        self._found: dict[str, torch.Tensor] = {}
        self._lost = ""  # why it is not loaded
        num_saved = saved.manifest.world_size
        if not self._feedback:
            return
        if not saved.variants("error_feedback"):
            self._lost = "the checkpoint has none"
        elif num_saved != num_ranks:
            self._lost = f"{num_saved} ranks saved it, and {num_ranks} load it"
        else:
            value = ValueTarget("error_feedback", saved)
            saved.check_form("error_feedback", value.value, {})
            shapes = {name: each.shape for name, each in value.value.items()}
            if self._feedback.fits(shapes):
                self._found, self.fresh = value.value, value.fresh
            else:
                self._lost = "it belongs to other parts of the parameters"

    def apply(self) -> None:
        """Set the error feedback. If it is not loaded, log why."""
        if self._feedback:
            if self._lost and self._saved.rank == 0:
                _log.warning(
                    "%s: error feedback of gradients starts from zero: %s",
                    self._saved.place,
                    self._lost,
                )
            self._before = self._feedback.replace(self._found)

    def undo(self) -> None:
        """Restore the old error feedback."""
        if self._before is not None:
            self._feedback.restore(self._before)


class RngTarget(ValueTarget):
    """The random number generators of this rank.

    A rank for which no state was saved gets seeds computed from the checkpoint's id and its rank.
    """

    def __init__(self, saved: Saved) -> None:
        super().__init__("rng", saved)
        self._seed = f"{saved.manifest.seal.id} {saved.rank}" if saved.variants("rng") else ""
        self._before: dict[str, Any] | None = None

    def apply(self) -> None:
        """Set the generators. Raises before it changes anything if the states are damaged."""
        if self.value is not None:
            try:
                setter = contents.restorer(self.value)
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointCorruptError(
                    f"'rng' holds no states of random number generators: {error}"
                ) from error
        elif self._seed:
            setter = contents.seed_for(self._seed)
        else:
            return
        self._before = contents.capture()
        setter()

    def undo(self) -> None:
        """Restore the old states."""
        if self._before is not None:
            contents.restore(self._before)
