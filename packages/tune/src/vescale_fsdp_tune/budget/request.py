"""What a user asks for: ``fully_shard(model, budget=...)``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.spi import devices
from vescale_fsdp_tune.costs.amount import Amount, is_path
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.settings import NUM_STATES, OptimizerName

_EXTRAS = ("int8", "offload")


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """The memory of a rank, and what a step needs it for: ``fully_shard(model, budget=...)``.

    Attributes:
        memory: of one rank, for parameters, gradients, optimizer states, activations, and all
            buffers of the engine. ``"10GiB"`` or a number of bytes. ``"80%"`` of the device's
            memory; on the CPU of the host's free memory, divided by ``LOCAL_WORLD_SIZE``.
            ``"auto"``: 90% of what is free on the device now, with what the model takes there,
            because sharding frees it. If ranks differ, the smallest counts. Or the path of a
            written choice, ``"choice.yaml"``: nothing is measured then.
        inputs: the arguments of one forward on one rank, the largest of training: a tensor, a
            tuple, a dict of keyword arguments, or a tuple and a dict. They may be on the meta
            device. None: activations and the times of the model are unknown and count as nothing,
            so leave memory for activations out of ``memory``.
        loss: from the output of forward. None: its ``.loss``, or the sum of its first tensor that
            requires a gradient. What is computed outside of forward and ``loss`` is not counted.
        optimizer: whose states and time are counted: "adamw", "adamw8bit", "muon", "sgd" (with
            momentum), "none", or "adamw_fused" and "sgd_fused" for torch's with ``fused=True``.
            Times of "adamw8bit" and "muon" count as AdamW's.
        micro_batches: forwards and backwards for each step of the optimizer.
        allow: what may be chosen beside what keeps numbers and devices as they are: "int8"
            (weights and gradients are sent in 8 bits), "offload" (to the host's memory).
        network: its bandwidth and latency (`costs.Link`). None: they are measured.
        machine: all rates, also of copies, optimizer and engine (`costs.Machine`).
            None: they are measured.
        save_to: path of a ``.yaml`` or ``.yml`` to which the choice is written, by the first rank.
        unit_mp_policy: dtypes of units below the root. None: ``mp_policy``, without its
            ``output_dtype``.

    Raises:
        ValueError: a value is not one of the accepted ones.
    """

    memory: str | int | PathLike[str] = "auto"
    inputs: Any = None
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: OptimizerName = "adamw"
    micro_batches: int = 1
    allow: Collection[Literal["int8", "offload"]] = ()
    network: Link | None = None
    machine: Machine | None = None
    save_to: str | PathLike[str] | None = None
    unit_mp_policy: MixedPrecisionPolicy | None = None

    @classmethod
    def of(cls, value: Budget | str | int | PathLike[str]) -> Budget:
        """Return the budget for a value of the argument ``budget``.

        Raises:
            ValueError: it is none of the accepted ones.
        """
        return value if isinstance(value, Budget) else cls(memory=value)

    def __post_init__(self) -> None:
        if self.path is None:
            Amount.parse(self.memory)
        if self.optimizer not in NUM_STATES:
            raise ValueError(
                f"Budget(optimizer={self.optimizer!r}): expected one of {', '.join(NUM_STATES)}"
            )
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            raise ValueError(
                f"Budget(micro_batches={self.micro_batches!r}): expected an int of at least 1"
            )
        if isinstance(self.allow, str) or not set(self.allow) <= set(_EXTRAS):
            raise ValueError(
                f"Budget(allow={self.allow!r}): expected a list of {', '.join(_EXTRAS)}"
            )
        if self.network is not None and self.machine is not None:
            raise ValueError("Budget(network=..., machine=...): a machine has a network; use one")
        if self.save_to is not None and not is_path(fspath(self.save_to)):
            raise ValueError(
                f"Budget(save_to={fspath(self.save_to)!r}): expected a path that ends with .yaml "
                "or .yml, as budget= takes it"
            )
        if self.inputs is not None:
            try:
                arguments_of(self.inputs)
            except ValueError as error:
                raise ValueError(f"Budget(inputs=...) got {error}") from None

    @property
    def path(self) -> str | None:
        """The path of a written choice, if ``memory`` is one."""
        text = fspath(self.memory) if isinstance(self.memory, PathLike) else self.memory
        return str(text) if is_path(text) else None

    def num_bytes(self, device: torch.device, of_model: int) -> int:
        """Return the bytes of this rank.

        Args:
            of_model: that the model takes on the device now.
        """
        amount = Amount.parse(self.memory)
        if amount.num_bytes is not None:
            return amount.num_bytes
        total = free = devices.free_bytes(device) + of_model
        if device.type != "cpu":
            total = torch.get_device_module(device).mem_get_info(device)[1]
        return amount.bytes_of(total, free)


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
