"""Which backend of ``torch.distributed`` runs the collectives of a group, by the tensor's device.

``dist.get_backend`` does not tell: it returns what ``init_process_group`` was called with. After a
call without a backend that is "undefined"; on CUDA such a call makes NCCL, and no backend for the
CPU. After a call with one backend per device it is "cpu:gloo,cuda:nccl". So only this file calls
it. The group itself knows its backends, by device type.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist

from vescale_fsdp import devices

# What torch's implementations of NCCL call themselves, too. 2.15 makes the first for "nccl".
_OF_NCCL = {"nccl2", "nccl-lazy", "nccl-legacy"}
# By device type, because to ask takes longer than to start a short collective. A backend that has
# no name yet, or none at all, is asked for again.
_NAMES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()


def backend_of(group: dist.ProcessGroup, device: torch.device | str) -> Any:
    """The backend that runs the collectives of a group on tensors of a device; None if none does.

    Also None for groups that are written in Python, and for a bare backend that is used as a
    group. Tests have both.
    """
    try:
        return group._get_backend(torch.device(torch.device(device).type))
    except (AttributeError, RuntimeError):  # a group with NCCL alone has none for the CPU
        return None


def backend_name(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """The name of the backend of a group for tensors of a device, such as "nccl" or "gloo".

    Always in lower case. Empty if the group has no backend for the device. For example, a group
    with NCCL alone has none for the CPU.

    Args:
        group: None for the default group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    kind = torch.device(device).type
    known = _NAMES.setdefault(group, {})
    if kind in known:
        return known[kind]
    name = _name_of(backend_of(group, device)) or _configured(group).get(kind, "")
    if name:
        known[kind] = name
    if name or _device_types(group):
        return name
    return _name_of(group)  # a bare backend, which takes tensors of any device


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The names of all backends of a group, by device type.

    Args:
        group: None for the default group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    kinds = _device_types(group) or list(_configured(group))
    return {kind: backend_name(group, kind) for kind in kinds}


def nccl_devices(group: dist.ProcessGroup) -> list[str]:
    """The device types for which NCCL runs the collectives of a group."""
    return [kind for kind, name in backends_of(group).items() if name == "nccl"]


def is_fake() -> bool:
    """Whether the default group has torch's "fake" backend: the other ranks do not exist."""
    return "fake" in backends_of().values()


def spelling_of(group: dist.ProcessGroup) -> str:
    """The ``backend`` argument of ``dist.new_group`` for a group with the same backends."""
    try:
        return str(dist.get_backend(group))
    except ValueError:  # torch has not made this group
        return ",".join(f"{kind}:{name}" for kind, name in backends_of(group).items())


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device to which a tensor of ``device`` has to be copied for a collective of a group.

    It is ``device`` itself if the group has a backend for it, else the device of the group's first
    backend. With NCCL alone, CPU tensors (parameters and gradients under ``CPUOffloadPolicy``) are
    copied to the accelerator.
    """
    kinds = _device_types(group)
    if not kinds or device.type in kinds:
        return device
    return devices.current_device(kinds[0])


class Detour:
    """A collective on a copy of a tensor, on a device for which the group has a backend.

    It waits like a ``Work``.
    """

    def __init__(self, work: dist.Work, there: torch.Tensor, here: torch.Tensor) -> None:
        self._work, self._there, self._here = work, there, here

    def wait(self) -> None:
        """Wait, and copy the result into the original tensor."""
        self._work.wait()
        with torch.no_grad():
            self._here.copy_(self._there)


def _device_types(group: dist.ProcessGroup) -> list[str]:
    """The device types for which a group has backends; none if the group does not tell."""
    return [device.type for device in getattr(group, "_device_types", ())]


def _configured(group: dist.ProcessGroup) -> dict[str, str]:
    """The backends with which torch made a group, by device type; none if torch did not make it."""
    try:
        config = dist.get_backend_config(group)
    except (TypeError, ValueError):
        return {}
    pairs = (pair.partition(":") for pair in config.split(",") if pair)
    return {kind: name.lower() for kind, _, name in pairs}


def _name_of(backend: Any) -> str:
    try:
        name = cast(str, backend.name()).lower()
    except (AttributeError, RuntimeError):  # it is None, or has no name
        return ""
    if name in _OF_NCCL:
        return "nccl"
    return "" if name == "undefined" else name
