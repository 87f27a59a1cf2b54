"""What a user asks for: ``fully_shard(model, budget=...)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

import torch

from vescale_fsdp import devices
from vescale_fsdp.costs import Machine

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_AUTO_SHARE = 0.9  # of what is free
_ALLOWED = ("int8", "offload")
_OPTIMIZERS = ("adamw", "adamw8bit", "muon", "sgd", "none")
_ACCEPTED = (
    'a size as "10GiB", a part of the device\'s memory as "80%", "auto", a number of bytes, or the '
    'path of a written choice as "choice.yaml"'
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """The memory of a rank, and what a step needs it for. See `vescale_fsdp.fully_shard`.

    Attributes:
        memory: of one rank, for parameters, gradients, optimizer states, activations, and all
            buffers of the engine. ``"10GiB"`` or a number of bytes; ``"80%"`` of the device's
            memory (on the CPU: of the host's free memory, divided by ``LOCAL_WORLD_SIZE``);
            ``"auto"``: 90% of what is free on the device now, with what the model takes there,
            because sharding frees it. If ranks differ, the smallest counts.
        inputs: the arguments of one forward on one rank, the largest of training: a tensor, a
            tuple, a dict of keyword arguments, or a tuple and a dict. They may be on the meta
            device. None: activations and the times of the model are unknown and count as nothing,
            so leave memory for activations out of ``memory``.
        loss: from the output of forward. None: its ``.loss``, or the sum of its first tensor. What
            is computed outside of forward and ``loss`` is not counted.
        optimizer: whose states are counted: "adamw", "adamw8bit", "muon", "sgd" (with momentum) or
            "none".
        micro_batches: forwards and backwards for each step of the optimizer.
        allow: what may be chosen beside what keeps numbers and devices as they are: "int8"
            (weights and gradients are sent in 8 bits), "offload" (to the host's memory).
        machine: rates of network, copies and optimizer (`vescale_fsdp.costs.Machine`). None: they
            are measured.
        save_to: path of a yaml to which the choice is written, by rank 0.

    Raises:
        ValueError: a value is not one of the accepted ones.
    """

    memory: str | int = "auto"
    inputs: Any = None
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: Literal["adamw", "adamw8bit", "muon", "sgd", "none"] = "adamw"
    micro_batches: int = 1
    allow: Collection[Literal["int8", "offload"]] = ()
    machine: Machine | None = None
    save_to: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.choice_path is not None:
            raise ValueError(
                f"Budget(memory={self.memory!r}): a written choice has all settings; pass it as "
                "budget= itself"
            )
        _check_memory(self.memory)
        if self.optimizer not in _OPTIMIZERS:
            raise ValueError(
                f"Budget(optimizer={self.optimizer!r}): expected one of {', '.join(_OPTIMIZERS)}"
            )
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            raise ValueError(
                f"Budget(micro_batches={self.micro_batches!r}): expected an int of at least 1"
            )
        if isinstance(self.allow, str) or not set(self.allow) <= set(_ALLOWED):
            raise ValueError(
                f"Budget(allow={self.allow!r}): expected a list of {', '.join(_ALLOWED)}"
            )
        if self.inputs is not None:
            try:
                arguments_of(self.inputs)
            except ValueError as error:
                raise ValueError(f"Budget(inputs=...) got {error}") from None

    @property
    def choice_path(self) -> str | None:
        """The path of a written choice, if ``memory`` is one."""
        return _path_of(self.memory)

    def num_bytes(self, device: torch.device, of_model: int) -> int:
        """Return the bytes of this rank.

        Args:
            of_model: that the model takes on the device now.
        """
        if isinstance(self.memory, int):
            return self.memory
        if self.memory == "auto":
            return int(_AUTO_SHARE * (devices.free_bytes(device) + of_model))
        percent = _PERCENT.fullmatch(self.memory.strip())
        if percent:
            return int(float(percent[1]) / 100 * devices.total_bytes(device))
        size = _SIZE.fullmatch(self.memory.strip())
        assert size is not None, "it was checked"
        return int(float(size[1]) * _UNITS[size[2].upper()])


def budget_of(value: object) -> Budget | str:
    """Return the budget, or the path of a written choice, for the argument ``budget``.

    Raises:
        ValueError: it is none of the accepted ones.
    """
    if isinstance(value, Budget):
        return value
    path = _path_of(value)
    if path is not None:
        return path
    _check_memory(value)
    assert isinstance(value, str | int), "it was checked"
    return Budget(memory=value)


def _path_of(value: object) -> str | None:
    if isinstance(value, PathLike):
        value = fspath(value)
    is_path = isinstance(value, str) and value.lower().endswith((".yaml", ".yml"))
    return str(value) if is_path else None


def _check_memory(value: object) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    is_text = isinstance(value, str) and (
        value == "auto" or any(each.fullmatch(value.strip()) for each in (_PERCENT, _SIZE))
    )
    if not (is_number or is_text):
        raise ValueError(f"fully_shard: budget={value!r} does not work; expected {_ACCEPTED}")


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a forward.

    Raises:
        ValueError: ``inputs`` is something else.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, list | tuple):
        if len(inputs) == 2 and isinstance(inputs[0], list | tuple) and isinstance(inputs[1], dict):
            return tuple(inputs[0]), inputs[1]
        return tuple(inputs), {}
    if hasattr(inputs, "keys") and hasattr(inputs, "__getitem__"):  # BatchEncoding
        return (), {key: inputs[key] for key in inputs.keys()}  # noqa: SIM118
    raise ValueError(
        f"a {type(inputs).__name__}, expected the arguments of forward: a tensor, a tuple, a dict "
        "of keyword arguments, or a tuple and a dict"
    )
