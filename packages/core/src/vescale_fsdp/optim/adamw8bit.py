"""AdamW8bit: AdamW with moments of 8 bits. Its results do not depend on the sharding.

A step on some blocks, in float32::

    codes, scales --decode--> moments --AdamW--> moments --encode--> codes, scales
                                        |
                                    parameters

The update uses the moments before they are encoded. Each block is updated separately, and blocks
are never split between ranks, so nothing is communicated. Small parameters are copied together into
one batch; large parameters are split into several batches, to need little float32 memory at a time.

Source: arXiv 1711.05101 (AdamW), arXiv 2110.02861 (8-bit optimizers).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.engine import Granularity, GranularityPolicy
from vescale_fsdp.errors import PlanError
from vescale_fsdp.optim.base import (
    Group,
    Params,
    ShardedOptimizer,
    State,
    assign,
    gradient_of,
    local_of,
    zeros_placed,
)
from vescale_fsdp.optim.codes import SMALLEST_SCALE, Batch, Codebook, Entry, batches, codebook
from vescale_fsdp.ragged import Blocks, BlockSize, remaining_box

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # name, and whether it is signed
_SCALE = "_scale"
_SMALLEST = 4096  # default: elements from which on a tensor has moments of 8 bits
_NOT_OFFERED = ("amsgrad", "foreach", "capturable", "differentiable", "fused")
# Elements in a batch: on a CPU as many as fit its cache, on other devices enough to use the device.
_AT_ONCE_CPU, _AT_ONCE = 2**18, 2**24


class _Task(NamedTuple):
    """A parameter to step on. This rank has at least one element of it."""

    param: torch.Tensor
    local: torch.Tensor  # this rank's part of it
    grad: torch.Tensor  # this rank's part of the gradient


class AdamW8bit(ShardedOptimizer):
    """``torch.optim.AdamW`` with moments of one byte per element and one scale per block.

    ::

        policy = AdamW8bit.granularity()
        for block in model.blocks:
            fully_shard(block, granularity=policy)
        fully_shard(model, granularity=policy)
        optimizer = AdamW8bit(model.parameters(), lr=1e-3)

    A tensor with fewer than ``min_8bit_size`` elements, on all ranks together, keeps moments in
    float32. With float32 parameters its step is then that of ``torch.optim.AdamW(foreach=False)``,
    bit for bit. Numbers do not depend on the number of ranks, the granularity or the units.

    The arithmetic is in float32 (float64 for float64 parameters); parameters of 16 bits are rounded
    once, at the end. NaN or infinity in a gradient makes its whole block NaN. A second moment
    below 1.6e-7 of the largest in its block is kept as 0, as in other implementations: if
    magnitudes in a block differ by more than 2,500 times, use smaller blocks or float32.

    State: ``step``, a float32 on the CPU; ``exp_avg`` and ``exp_avg_sq``, uint8 codes with the
    parameter's shape and placements; ``exp_avg_scale`` and ``exp_avg_sq_scale``, one float32 per
    block, sharded as the parameter. 2.03 bytes per element; AdamW has 8.

    Cost: no communication. During a step about 30 bytes of memory for each of up to 2**24 elements,
    or 2**18 on a CPU.

    Args:
        params: parameters or (name, parameter) pairs, or dicts for groups of them. Every option but
            the first may differ between groups.
        lr: a float or a tensor of one element, which is read at each step.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        amsgrad: not supported.
        maximize: maximize the loss instead of minimizing it.
        foreach: not supported, like capturable, differentiable and fused; only in the signature.
        block_size: elements of a block, or (rows, columns) of a tile. Vectors and tensors of more
            than three dimensions then have blocks of rows * columns elements.
        min_8bit_size: tensors with at least this many elements have moments of 8 bits.

    Raises:
        PlanError: a block of a parameter is split between ranks.
        ValueError: an option has a value that is not supported.

    Source: arXiv 2110.02861. Maps, block size and threshold are those of bitsandbytes and torchao.
    """

    fixed_options: ClassVar[frozenset[str]] = frozenset(
        ["block_size", "min_8bit_size", *_NOT_OFFERED, "decoupled_weight_decay"]
    )

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        block_size: BlockSize = 256,
        min_8bit_size: int = _SMALLEST,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(map(float, betas)),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,  # in AdamW's groups too; state dicts compare keys
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    @staticmethod
    def granularity(
        block_size: BlockSize = 256, *, min_8bit_size: int = _SMALLEST
    ) -> GranularityPolicy:
        """The policy for ``fully_shard(granularity=...)`` for an optimizer with these options.

        Tensors that keep moments in float32 need no blocks. To join other policies, use
        ``vescale_fsdp.combine``.
        """
        _check_block_size(block_size)

        def policy(fqn: str, param: nn.Parameter) -> Granularity | None:
            if param.numel() < min_8bit_size or not param.is_floating_point():
                return None
            blocks = Blocks(block_size, tuple(param.shape))
            if blocks.tile is not None:
                return Granularity.tile(*blocks.tile)
            return Granularity.elements(blocks.numel)

        return policy

    # Methods for the base class

    def check_layout(self, param: torch.Tensor, group: Group, name: str) -> None:
        """Raise if a block of ``param`` is split, or AdamW cannot step on its elements.

        Raises:
            PlanError: a block is split between ranks.
            ValueError: the parameter is not of real floating-point numbers.
        """
        _check_options(group)
        if not param.is_floating_point():
            raise ValueError(
                f"AdamW8bit: {name} is {param.dtype}, expected real floating-point numbers"
            )
        if not isinstance(param, DTensor) or not _is_8bit(param, group):
            return
        size, smallest, spec = group["block_size"], group["min_8bit_size"], param._spec
        wanted = str(size) if smallest == _SMALLEST else f"{size}, min_8bit_size={smallest}"
        try:
            Blocks(size, tuple(param.shape)).placements(spec.placements, spec.mesh.shape)
        except ValueError as error:
            raise PlanError(
                f"AdamW8bit: {name} of shape {tuple(param.shape)} is split inside a block of "
                f"{size}: {error}. Its placements are {spec.placements}. Let fully_shard shard it "
                f"with granularity=AdamW8bit.granularity({wanted}) (combine(...) joins it with "
                "others), or keep its moments in float32 with a larger min_8bit_size in its "
                "parameter group"
            ) from error

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        """Return `step` and two moments: codes and scales, or float32 numbers."""
        state: State = {"step": torch.tensor(0.0)}
        if not _is_8bit(param, group):
            dtype = _working_dtype(param)
            return state | {name: zeros_placed(param, dtype) for name, _ in _MOMENTS}
        blocks, placements, grid_placements = _layout(param, group)
        for name, signed in _MOMENTS:
            codes = zeros_placed(param, torch.uint8, param.shape, placements)
            local_of(codes).fill_(codebook(signed, torch.device("cpu")).zero)
            scales = zeros_placed(param, torch.float32, blocks.grid, grid_placements)
            local_of(scales).fill_(SMALLEST_SCALE)
            state |= {name: codes, name + _SCALE: scales}
        return state

    def convert_state(self, param: torch.Tensor, group: Group, saved: State) -> State:
        """Convert float32 moments of ``torch.optim.AdamW`` to codes and scales.

        Raises:
            ValueError: the state is of an AdamW with amsgrad.
        """
        if "max_exp_avg_sq" in saved:
            raise ValueError(
                "AdamW8bit has no amsgrad, but the loaded state dict has its max_exp_avg_sq; "
                "remove that from the states first"
            )
        if not _is_8bit(param, group):
            return saved
        values: State = {"step": saved.get("step", 0.0)}
        for name, signed in _MOMENTS:
            moment = saved.get(name)
            if not isinstance(moment, torch.Tensor) or not moment.is_floating_point():
                values |= {key: saved[key] for key in (name, name + _SCALE) if key in saved}
                continue
            if moment.shape != param.shape:
                raise ValueError(
                    f"AdamW8bit: the loaded {name!r} has shape {tuple(moment.shape)}, expected "
                    f"{tuple(param.shape)}"
                )
            values |= self._encoded(param, group, name, moment, signed)
        return values

    def _encoded(
        self, param: torch.Tensor, group: Group, name: str, moment: torch.Tensor, signed: bool
    ) -> State:
        """Encode a moment. Returns its two states: codes and scales."""
        blocks, placements, grid_placements = _layout(param, group)
        whole = assign(zeros_placed(param, torch.float32, param.shape, placements), moment)
        codes = zeros_placed(param, torch.uint8, param.shape, placements)
        scales = zeros_placed(param, torch.float32, blocks.grid, grid_placements)
        tensors = {"moment": whole, "codes": codes, "scales": scales}
        for batch in _batches([_entry(param, group, tensors)]):
            book = codebook(signed, local_of(codes).device)
            _encode(batch, book, batch.rows("moment", torch.float32), "codes", "scales")
        return {name: codes, name + _SCALE: scales}

    def dequantized_state_dict(self) -> dict[str, Any]:
        """The state dict with moments of float32, for ``torch.optim.AdamW``.

        Moments have the parameter's shape and placements. Loaded into an AdamW8bit with the same
        blocks they give the same codes.

        Cost: 8 bytes for each element. No communication.
        """
        state_dict = self.state_dict()
        states = dict(state_dict["state"])
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for key, param in zip(keys, params, strict=True):
            if key in states and "exp_avg_scale" in states[key]:
                states[key] = self._decoded(param, groups[id(param)], states[key])
        for group in state_dict["param_groups"]:
            for option in ("block_size", "min_8bit_size"):
                del group[option]
        return {**state_dict, "state": states}

    def _decoded(self, param: torch.Tensor, group: Group, state: State) -> State:
        found: State = {"step": state["step"].clone()}
        placements = _layout(param, group)[1]
        for name, signed in _MOMENTS:
            moment = zeros_placed(param, torch.float32, param.shape, placements)
            tensors = {"moment": moment, "codes": state[name], "scales": state[name + _SCALE]}
            for batch in _batches([_entry(param, group, tensors)]):
                book = codebook(signed, local_of(moment).device)
                batch.put_rows("moment", _decode(batch, book, "codes", "scales"))
            found[name] = moment
        return found

    def update(self) -> None:
        """Step on all parameters that have a gradient."""
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[_Task]] = {}
            block = Blocks(group["block_size"], ()).numel
            for param in self.with_gradient(group):
                step = self.state[param]["step"]
                step += 1
                # Also without local elements: gradient_of may redistribute, which is collective.
                local, grad = local_of(param), gradient_of(param)
                if local.numel():
                    width = block if _is_8bit(param, group) else 0
                    key = (width, step.item(), local.device, _working_dtype(param))
                    alike.setdefault(key, []).append(_Task(param, local.detach(), grad))
            for (width, step, _, dtype), tasks in alike.items():
                step_on = self._step_8bit if width else self._step_float
                step_on(tasks, group, _Formula.of(group, step), dtype)

    def _step_float(
        self, tasks: list[_Task], group: Group, formula: _Formula, dtype: torch.dtype
    ) -> None:
        """Step on parameters with float moments."""
        numbers = [task.local.to(dtype) for task in tasks]
        gradients = [task.grad.to(dtype) for task in tasks]
        moments = [[local_of(self.state[t.param][name]) for t in tasks] for name, _ in _MOMENTS]
        formula.step(numbers, gradients, moments[0], moments[1])
        for task, values in zip(tasks, numbers, strict=True):
            if values is not task.local:
                task.local.copy_(values)

    def _step_8bit(
        self, tasks: list[_Task], group: Group, formula: _Formula, dtype: torch.dtype
    ) -> None:
        """Step on parameters with 8-bit moments. All have blocks of the same size."""
        dense = [task.local.contiguous() for task in tasks]  # copies only of transposed ones
        entries = []
        for task, local in zip(tasks, dense, strict=True):
            tensors = {**self.state[task.param], "param": local, "grad": task.grad}
            entries.append(_entry(task.param, group, tensors))
        books = [codebook(signed, dense[0].device) for _, signed in _MOMENTS]
        for batch in _batches(entries):
            numbers = batch.rows("param", dtype)
            moments = [
                _decode(batch, book, name, name + _SCALE).to(dtype)
                for book, (name, _) in zip(books, _MOMENTS, strict=True)
            ]
            formula.step([numbers], [batch.rows("grad", dtype)], *([each] for each in moments))
            for book, (name, _), moment in zip(books, _MOMENTS, moments, strict=True):
                _encode(batch, book, moment.float(), name, name + _SCALE)
            batch.put_rows("param", numbers)
        for task, values in zip(tasks, dense, strict=True):
            if values is not task.local:
                task.local.copy_(values)


@dataclass(frozen=True)
class _Formula:
    """AdamW's formula with the options of a group, at one step. It is element-wise."""

    decay: float  # factor of the parameter
    betas: tuple[float, float]
    correction: float  # of the root of the second moment
    step_size: float
    eps: float
    maximize: bool

    @classmethod
    def of(cls, group: Group, step: float) -> _Formula:
        """Return the formula at the given step, counted from 1."""
        # Arithmetic with a tensor lr uses its dtype, as in torch.
        lr, (beta1, beta2) = group["lr"], group["betas"]
        return cls(
            decay=float(1 - lr * group["weight_decay"]),
            betas=(beta1, beta2),
            correction=(1 - beta2**step) ** 0.5,
            step_size=float(lr / (1 - beta1**step)),
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
    ) -> None:
        """Change parameters and moments in place; all have one dtype."""
        beta1, beta2 = self.betas
        if self.maximize:
            grads = list(torch._foreach_neg(grads))
        if self.decay != 1:
            torch._foreach_mul_(params, self.decay)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(roots, self.correction)
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(params, exp_avgs, roots, -self.step_size)


def _is_8bit(param: torch.Tensor, group: Group) -> bool:
    """Whether its moments have 8 bits. It depends on the full tensor, not on this rank's part."""
    return bool(param.numel() >= max(group["min_8bit_size"], 1))


def _working_dtype(param: torch.Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _blocks(param: torch.Tensor, group: Group) -> Blocks:
    return Blocks(group["block_size"], tuple(param.shape))


def _layout(
    param: torch.Tensor, group: Group
) -> tuple[Blocks, Sequence[Placement] | None, Sequence[Placement] | None]:
    """Return a parameter's blocks, its placements, and those of its scales.

    Placements are None for a plain tensor.
    """
    blocks = _blocks(param, group)
    if not isinstance(param, DTensor):
        return blocks, None, None
    spec = param._spec
    return blocks, spec.placements, blocks.placements(spec.placements, spec.mesh.shape)


def _entry(param: torch.Tensor, group: Group, tensors: dict[str, Any]) -> tuple[Entry, int]:
    """Return the blocks of a parameter's tensors on this rank, and their number of elements.

    The tensors are sharded as the parameter, or are scales.
    """
    box: Sequence[int] = param.shape
    if isinstance(param, DTensor) and any(type(p) is Shard for p in param._spec.placements):
        mesh = param.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "parameters are made by the ranks of their mesh"
        box = remaining_box(param.shape, param._spec.placements, mesh.shape, coordinate).sizes
    flat = {name: _flat(local_of(each)) for name, each in tensors.items() if name != "step"}
    return Entry(_blocks(param, group), box, flat), local_of(param).numel()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _batches(entries: list[tuple[Entry, int]]) -> Iterator[Batch]:
    tensors = next(iter(entries))[0].tensors
    device = next(iter(tensors.values())).device
    return batches(entries, _AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE)


def _decode(batch: Batch, book: Codebook, codes: str, scales: str) -> torch.Tensor:
    return book.decode(batch.rows(codes, torch.uint8), batch.scales(scales))


def _encode(batch: Batch, book: Codebook, numbers: torch.Tensor, codes: str, scales: str) -> None:
    found = book.encode(numbers)
    batch.put_rows(codes, found[0])
    batch.put_scales(scales, found[1])


def _check_options(group: Group) -> None:
    """Raise for invalid options.

    Raises:
        ValueError: names the option.
    """
    for name in _NOT_OFFERED:
        if group.get(name):
            raise ValueError(
                f"AdamW8bit has no {name}={group[name]}; leave it out, or use torch.optim.AdamW"
            )
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a float or a tensor of one element, got {tuple(lr.shape)}")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")
    _check_block_size(group["block_size"])


def _check_block_size(size: Any) -> None:
    sides = size if isinstance(size, tuple) else (size,)
    if len(sides) > 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        raise ValueError(
            f"block_size must be a number of elements or (rows, columns) of a tile, got {size!r}"
        )
