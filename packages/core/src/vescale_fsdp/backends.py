"""Which backend of ``torch.distributed`` moves a tensor, by the group and the tensor's device.

``dist.get_backend`` does not say it: it returns what ``init_process_group`` was called with. That
is "undefined" after a call without a backend, which on CUDA makes NCCL and nothing for the CPU; it
is "cpu:gloo,cuda:nccl" after one with a backend for each device. So nothing else asks it. A group
knows its backends itself, by device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from vescale_fsdp import devices


def backend_of(group: dist.ProcessGroup, device: torch.device | str) -> Any:
    """What runs the collectives of a group on tensors of a device; None if there is nothing.

    None also for groups that are written in Python, and for a bare backend that is used as a group:
    tests have them.
    """
    try:
        return group._get_backend(torch.device(torch.device(device).type))
    except (AttributeError, RuntimeError):  # NCCL's alone has none for the CPU
        return None


def backend_name(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """The name of what runs the collectives of a group on tensors of a device: "nccl", "gloo".

    Empty if there is nothing, as for the CPU where all is NCCL's. In lower case, whatever was
    passed to ``init_process_group``.

    Args:
        group: None for the default group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    kind, backend = torch.device(device).type, backend_of(group, device)
    name = _name_of(backend) or _configured(group).get(kind, "")
    if name or _device_types(group):
        return name
    return _name_of(group)  # it takes tensors of any device


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The names of all backends of a group, by the types of their devices.

    Args:
        group: None for the default group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    kinds = _device_types(group) or list(_configured(group))
    return {kind: backend_name(group, kind) for kind in kinds}


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group is torch's stand-in for many ranks in one process, where nobody answers."""
    return "fake" in backends_of(group).values()


def spelling_of(group: dist.ProcessGroup) -> str:
    """What to pass to ``dist.new_group`` for another group with the same backends."""
    try:
        return str(dist.get_backend(group))
    except ValueError:  # torch has not made this one
        return ",".join(f"{kind}:{name}" for kind, name in backends_of(group).items())


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor of ``device`` has to be for a collective of a group.

    There, if the group has a backend for it; else on the device that it has one for. With NCCL
    alone, what rests on the CPU (parameters and gradients under ``CPUOffloadPolicy``) goes by the
    accelerator.
    """
    kinds = _device_types(group)
    if not kinds or device.type in kinds:
        return device
    return devices.current_device(kinds[0])


class Detour:
    """A collective on a copy of a tensor, which the group cannot reach. Waits like a ``Work``."""

    def __init__(self, work: dist.Work, there: torch.Tensor, here: torch.Tensor) -> None:
        self._work, self._there, self._here = work, there, here

    def wait(self) -> None:
        """Wait, and bring the result to where it belongs."""
        self._work.wait()
        with torch.no_grad():
            self._here.copy_(self._there)


def _device_types(group: dist.ProcessGroup) -> list[str]:
    """The types of the devices that a group says to have backends for; none if it does not say."""
    return [device.type for device in getattr(group, "_device_types", ())]


def _configured(group: dist.ProcessGroup) -> dict[str, str]:
    """The backends that torch has made a group with, by device; none if it has not made it."""
    try:
        config = dist.get_backend_config(group)
    except (TypeError, ValueError):
        return {}
    pairs = (pair.partition(":") for pair in config.split(",") if pair)
    return {kind: name.lower() for kind, _, name in pairs}


def _name_of(backend: Any) -> str:
    try:
        name = cast(str, backend.name()).lower()
    except (AttributeError, RuntimeError):  # there is none, or it does not tell
        return ""
    return "" if name == "undefined" else name
