"""offload_: an optimizer whose states are in host memory, and which steps on the device.

``CPUOffloadPolicy`` keeps parameters and gradients in host memory, so the optimizer's states are
there too, and the step runs on the CPU. `offload_` takes the parts of this apart:

==============================  ====================================  ==============================
in host memory                  ``fully_shard(offload_policy=...)``   optimizer
==============================  ====================================  ==============================
states                          none                                  ``offload_(optimizer)``
parameters, gradients           ``CPUOffloadPolicy()``                ``offload_(.., states=False)``
all three, step on the device   ``CPUOffloadPolicy()``                ``offload_(optimizer)``
all three, step on the CPU      ``CPUOffloadPolicy()``                as it is
==============================  ====================================  ==============================

A step has several parts. While the device steps on one part, the next one is copied to the device,
and the one before it to the host. A part is stepped on by hiding the gradients of all others, as
each optimizer skips parameters without a gradient. On the CPU nothing is moved.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.optim.group import OptimizerGroup
from vescale_fsdp.ragged import RaggedTensor, wrap_local

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
MIN_BYTES = 1 << 10  # smaller states, such as the number of steps, stay where they are
_MARK = "_vescale_offload"


def offload_(
    optimizer: OptimizerT, *, states: bool = True, part_bytes: int = 256 << 20
) -> OptimizerT:
    """Let an optimizer keep its states in pinned host memory, and step on the device, in parts.

    The numbers are those of a step without it, to the bit. Parameters may be on the device or, with
    ``CPUOffloadPolicy``, on the host.

    Args:
        optimizer: one whose update of a parameter depends on no other parameter: those of
            ``torch.optim`` but LBFGS, `AdamW8bit`, and most others. Of an `OptimizerGroup`, each
            member.
        states: whether states are on the host between steps. False: on the device, for parameters
            that are offloaded.
        part_bytes: of the parameters on one rank that are stepped on at a time. The device holds
            what belongs to at most three parts. The same on all ranks.

    Returns:
        ``optimizer``, whose ``step`` is another one. Call this function on a copy of it too.

    Cost: per step, each state crosses the bus twice; so do offloaded parameters, and their
    gradients once. The host waits for the last part.

    Raises:
        TypeError: LBFGS; an optimizer that `flatten_` was called on.
        ValueError: ``part_bytes`` is not positive; or `offload_` was called on it already.
    """
    if isinstance(optimizer, OptimizerGroup):
        for each in optimizer.optimizers.values():
            offload_(each, states=states, part_bytes=part_bytes)
        return optimizer
    if isinstance(optimizer, LBFGS):
        raise TypeError("offload_: LBFGS computes with all parameters at once; use another one")
    if compat.has_other_init_group(optimizer):
        raise TypeError(
            "offload_: flatten_ was called on this optimizer, and its states are views of one "
            "buffer; call one of the two"
        )
    if part_bytes < 1:
        raise ValueError(f"offload_: part_bytes must be positive, got {part_bytes}")
    if hasattr(optimizer, _MARK):
        raise ValueError("offload_: it was already called on this optimizer")
    streamed = _Streamed(optimizer, states, part_bytes)
    setattr(optimizer, _MARK, streamed)
    stepped: Any = Optimizer.profile_hook_step(streamed.step)  # hooks run once a step
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler that was made before
        stepped._wrapped_by_lr_sched = True
    vars(optimizer)["step"] = types.MethodType(stepped, optimizer)
    streamed.move_states_to_host(optimizer)
    optimizer.register_load_state_dict_post_hook(streamed.move_states_to_host)
    return optimizer


@dataclass
class _Part:
    """Parameters that are stepped on together, and their tensors that are on the host."""

    params: list[torch.Tensor] = field(default_factory=list)
    num_bytes: float = 0
    holders: list[_Holder] = field(default_factory=list)
    coming: transfers.Copies | None = None


@dataclass
class _Leaving:
    """Copies to the host, and what they read, which must not be freed before."""

    copies: transfers.Copies
    holders: list[_Holder]

    @classmethod
    def of(cls, holders: list[_Holder]) -> _Leaving:
        sources, targets = [each.here for each in holders], [each.host for each in holders]
        copies = transfers.Copies.to_host(sources, targets)
        for each in holders:
            each.settle()
        return cls(copies, holders)


class _Streamed:
    """The step of one optimizer. It does not own the optimizer."""

    def __init__(self, optimizer: Optimizer, states: bool, part_bytes: int) -> None:
        method = type(optimizer).step
        is_hooked = getattr(method, "hooked", False)  # by torch: hooks, and a profiler's range
        self._step: Callable[..., Any] = method.__wrapped__ if is_hooked else method  # type: ignore[attr-defined]
        self._moves_states, self._part_bytes = states, part_bytes
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}  # of parameters on the host

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step once on each part. A ``closure`` is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        params = [p for group in optimizer.param_groups for p in group["params"]]
        params = [param for param in params if param.grad is not None]
        gradients = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            self._step_on(optimizer, self._parts(params), dict(zip(params, gradients, strict=True)))
        finally:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
        return loss

    def _step_on(
        self,
        optimizer: Optimizer,
        parts: Sequence[_Part],
        gradients: dict[torch.Tensor, torch.Tensor | None],
    ) -> None:
        leaving: _Leaving | None = None
        groups = optimizer.param_groups
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        if parts:
            self._fetch(optimizer, parts[0], gradients)
        try:
            for index, part in enumerate(parts):
                if part.coming is not None:
                    part.coming.wait()
                if index + 1 < len(parts):
                    self._fetch(optimizer, parts[index + 1], gradients)
                for group, before in zip(groups, options, strict=True):
                    params = group["params"]  # some optimizers count the steps of a group
                    group.clear()
                    group.update({**before, "params": params})
                try:
                    self._step_on_part(optimizer, part, gradients)
                finally:
                    if leaving is not None:
                        leaving.copies.wait()  # its memory is free for what the stream does next
                    leaving = self._send(optimizer, part)
        finally:
            if leaving is not None:
                leaving.copies.synchronize()

    def _step_on_part(
        self,
        optimizer: Optimizer,
        part: _Part,
        gradients: dict[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Step on one part. Parameters on the host are replaced by stand-ins on the device."""
        device_params = {each.param: each for each in part.holders if isinstance(each, _Parameter)}
        lists = [group["params"] for group in optimizer.param_groups]
        try:
            for holder in part.holders:
                holder.enter(optimizer)
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                if device_params:
                    group["params"] = [
                        device_params[p].stand_in if p in device_params else p for p in params
                    ]
            for param in part.params:
                if param not in device_params:
                    param.grad = gradients[param]
            self._step(optimizer)
        finally:
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
            for each in device_params.values():
                each.take_states_back(optimizer)
            for param in part.params:
                param.grad = None

    def _parts(self, params: Sequence[torch.Tensor]) -> list[_Part]:
        """Split by sizes that are the same on all ranks."""
        parts = [_Part()]
        for param in params:
            if parts[-1].params and _device_of(param) != _device_of(parts[-1].params[-1]):
                parts.append(_Part())
            num_ranks = param.device_mesh.size() if isinstance(param, DTensor) else 1
            num_bytes = param.numel() * param.element_size() / num_ranks
            if parts[-1].params and parts[-1].num_bytes + num_bytes > self._part_bytes:
                parts.append(_Part())
            parts[-1].params.append(param)
            parts[-1].num_bytes += num_bytes
        return parts if params else []

    def _fetch(
        self,
        optimizer: Optimizer,
        part: _Part,
        gradients: dict[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Start to copy what the step on a part needs to the device."""
        holders: list[_Holder] = []
        for param in part.params:
            device = _device_of(param)
            if device is None:
                continue
            gradient = gradients[param]
            assert gradient is not None, "only those with a gradient are stepped on"
            if _is_on_host(_local(param), device):
                stand_in = self._stand_ins.setdefault(param, _stand_in_of(param))
                own = _Parameter(param, stand_in)
                holders += [own, _Gradient(own, gradient)]
            holders += _moved_states(optimizer.state.get(param, {}), device, from_host=True)
        part.holders = holders
        if part.holders:
            device = _device_of(part.params[0])
            assert device is not None, "it has something on the host"
            part.coming = transfers.Copies.to_device([each.host for each in part.holders], device)
            for each, made in zip(part.holders, part.coming.given_up(), strict=True):
                each.here = made

    def _send(self, optimizer: Optimizer, part: _Part) -> _Leaving | None:
        """Start to copy what was changed to the host, also states that the step has made."""
        holders = [each for each in part.holders if not isinstance(each, _Gradient)]
        for each in part.holders:
            each.leave(stays=not self._moves_states)
        if not self._moves_states:
            holders = [each for each in holders if not isinstance(each, _State)]
        else:
            for param in part.params:
                device = _device_of(param)
                if device is not None:
                    holders += _new_states(optimizer.state.get(param, {}), device)
        part.holders, part.coming = [], None
        return _Leaving.of(holders) if holders else None

    def move_states_to_host(self, optimizer: Optimizer) -> None:
        """Move all states, for example after a load. The host waits for it."""
        if not self._moves_states:
            return
        for param, states in optimizer.state.items():
            device = _device_of(param) if isinstance(param, torch.Tensor) else None
            holders = [] if device is None else _new_states(states, device)
            if holders:
                _Leaving.of(holders).copies.synchronize()


class _Holder:
    """A tensor on the host that has a place in an optimizer or a parameter."""

    host: torch.Tensor
    here: torch.Tensor  # the same on the device, during the step

    def enter(self, optimizer: Optimizer) -> None:
        """Put the tensor on the device in the place."""

    def leave(self, *, stays: bool) -> None:
        """Take it from the place, after the step. ``stays``: states remain on the device."""

    def settle(self) -> None:
        """Put the one on the host in the place, if it is a new one."""


class _State(_Holder):
    def __init__(self, states: dict[str, Any], name: str) -> None:
        self.states, self._name = states, name
        self.host = _local(states[name])

    def enter(self, optimizer: Optimizer) -> None:
        self.states[self._name] = _with_local(self.states[self._name], self.here)

    def leave(self, *, stays: bool) -> None:
        self.here = _local(self.states[self._name])  # some optimizers put another tensor there
        if not stays:
            self.settle()

    def settle(self) -> None:
        self.states[self._name] = _with_local(self.states[self._name], self.host)


class _Parameter(_Holder):
    """A parameter on the host. The optimizer gets ``stand_in`` instead, with its states.

    The parameter itself is not touched: others may have weak references to it, or a graph.
    """

    def __init__(self, param: torch.Tensor, stand_in: nn.Parameter) -> None:
        self.param, self.stand_in, self.host = param, stand_in, _local(param)

    def enter(self, optimizer: Optimizer) -> None:
        self._fill(self.here)
        vars(self.stand_in).update(vars(self.param))  # such as factors of its learning rate
        if self.param in optimizer.state:
            optimizer.state[self.stand_in] = optimizer.state.pop(self.param)

    def take_states_back(self, optimizer: Optimizer) -> None:
        """After the step, or where it has failed."""
        if self.stand_in in optimizer.state:
            optimizer.state[self.param] = optimizer.state.pop(self.stand_in)
        self.stand_in.grad = None

    def leave(self, *, stays: bool) -> None:
        self._fill(self.host)  # it must not hold the memory on the device

    def _fill(self, local: torch.Tensor) -> None:
        fresh = nn.Parameter(_with_local(self.param.detach(), local), self.param.requires_grad)
        torch.utils.swap_tensors(self.stand_in, fresh)


class _Gradient(_Holder):
    def __init__(self, own: _Parameter, gradient: torch.Tensor) -> None:
        self._own, self._gradient, self.host = own, gradient, _local(gradient)

    def enter(self, optimizer: Optimizer) -> None:
        self._own.stand_in.grad = _with_local(self._gradient, self.here)


def _stand_in_of(param: torch.Tensor) -> nn.Parameter:
    """An object that stands for a parameter in each step. Optimizers may know it by its id."""
    return nn.Parameter(_with_local(param.detach(), _local(param)), param.requires_grad)


def _moved_states(states: dict[str, Any], device: torch.device, *, from_host: bool) -> list[_State]:
    """Return holders for the states on one side that move. One that has two names stays."""
    tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
    names = Counter(map(id, tensors.values()))
    return [
        _State(states, name)
        for name, value in tensors.items()
        if names[id(value)] == 1 and _is_moved(value, device, from_host=from_host)
    ]


def _new_states(states: dict[str, Any], device: torch.device) -> list[_Holder]:
    """Return holders for states on the device that have no place on the host yet."""
    found = _moved_states(states, device, from_host=False)
    for holder in found:
        holder.here = holder.host
        holder.host = devices.empty_pinned(holder.here.shape, holder.here.dtype)
    return list(found)


def _device_of(param: torch.Tensor) -> torch.device | None:
    """Return the accelerator that computes with a parameter; None on the CPU."""
    device = param.device
    if isinstance(param, DTensor):
        device = devices.current_device(param.device_mesh.device_type)
    return device if devices.has_streams(device) else None


def _is_moved(value: torch.Tensor, device: torch.device, *, from_host: bool) -> bool:
    """Whether a state moves between host and device, and is on the side to move it from."""
    if compat.is_wrapper(value) and not isinstance(value, DTensor):
        return False
    local = _local(value)
    if from_host:  # all but the number of steps, which torch too keeps on the CPU
        return local.dim() > 0 and _is_on_host(local, device)
    return local.numel() * local.element_size() >= MIN_BYTES and not _is_on_host(local, device)


def _is_on_host(local: torch.Tensor, device: torch.device) -> bool:
    return devices.is_pinned(local) if device.type == "cpu" else local.device.type == "cpu"


def _local(value: torch.Tensor) -> torch.Tensor:
    return compat.local_tensor(value).detach()


def _with_local(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``value``, on this rank with another local tensor."""
    if isinstance(value, RaggedTensor):
        return wrap_local(local, value._spec, False)
    if isinstance(value, DTensor):
        return DTensor(local, value._spec, requires_grad=False)
    return local
