"""Decides which parameters are sent in 8 bits, and which blocks the layout must not split.

Blocks of codes must not be split between ranks. So they become the parameter's granularity, and the
user's granularity must not split them either.

With ``QuantizedReduce(error_feedback=True)`` each rank adds the rounding errors of its gradients to
its next gradients. So a resumed run is bitwise identical only if the checkpoint has them
(`ErrorFeedback`). They have the shapes of full parameters and differ between ranks, and are dropped
if the number of ranks changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.dbuffer import CodeDtype, Coding, Residuals, is_offered
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.fsdp_param import FSDPParam, Site
from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy, Roles, is_matrix
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.unit import unit_of, units_in
from vescale_fsdp.ragged import Blocks, BlockSize, CutBlockError


@dataclass(frozen=True)
class QuantizedGather:
    """All-gathers send weights as 8-bit codes with one scale per block; forward rounds them.

    The sharded parameters, and so the optimizer and checkpoints, keep their precision. Forward and
    backward see ``code * scale``, in the compute dtype; gradients are those of
    the rounded weights, and are applied to the exact ones (straight-through). All of it is the same
    bit for bit as gathering first and rounding each block of the whole tensor then, on any number
    of ranks.

    ::

        codec = QuantizedGather()
        for block in model.blocks:
            fully_shard(block, gather_codec=codec)
        fully_shard(model, gather_codec=codec)

    Args:
        dtype: "int8", evenly spaced codes, or "e4m3", which are denser near zero: better where a
            few numbers in a block are much larger than the others.
        block: n consecutive elements, or (rows, columns) of a tile of each matrix in the last two
            dimensions: its rows are not split, so tall tiles need much padding on many ranks.
            Vectors, and tensors of more than three dimensions, have blocks of rows * columns
            elements instead of tiles.
        policy: ``(fqn, param)`` -> True, False, another ``QuantizedGather`` for this parameter, or
            None for the rule below. The fqn is relative to the module.
        decode: False: forward sees codes and scales, as a `QuantizedWeight`, and linear layers
            compute with them where the device can (the input is rounded there, too). They are a
            group of their own, with a gather and a reduction beside those of the unit's others.

    Without a policy this applies to matrices of hidden layers, and stacks of them, with at least as
    many elements as a block. Biases, norms, embeddings, heads (by the rules of
    ``optim.split_named_params``, as far as the module shows them) and small tensors are sent in the
    compute dtype.

    Raises:
        ValueError: another dtype, or no such block.
    """

    dtype: CodeDtype = "int8"
    block: BlockSize = 256
    policy: Callable[[str, nn.Parameter], bool | QuantizedGather | None] | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ("int8", "e4m3"):
            raise ValueError(f"QuantizedGather: dtype must be 'int8' or 'e4m3', got {self.dtype!r}")
        _check_block("QuantizedGather", self.block)

    def granularity(self) -> GranularityPolicy:
        """What must not be cut, for ``combine`` with other policies."""
        return _granularity(self)


@dataclass(frozen=True)
class QuantizedReduce:
    """Reductions send gradients as int8 codes with one scale per block, and sum them in float32.

    Each rank rounds its own gradients, in blocks of the whole tensor, and sends every rank its
    part. That rank adds the parts of all ranks, including its own, in rank order, and divides.
    The sum over replicas (HSDP) that follows is exact. On one rank nothing is rounded.

    Rounding errors of different steps and ranks are independent, but they are noise in the
    gradients: measure the loss. With ``error_feedback`` a rank adds the rounding error to its next
    gradients.

    Args:
        block: n consecutive elements; or (rows, columns) of a tile.
        error_feedback: costs 4 bytes for each element of the whole parameters, on every rank, and
            as much in checkpoints, where it is kept for as many ranks.
        policy: ``(fqn, param)`` -> True, False, another ``QuantizedReduce`` for this parameter
            (its ``error_feedback`` is ignored), or None for the rule: every parameter that is not a
            vector and has at least as many elements as a block.

    Raises:
        ValueError: no such block.
    """

    block: BlockSize = 256
    error_feedback: bool = False
    policy: Callable[[str, nn.Parameter], bool | QuantizedReduce | None] | None = None

    dtype: ClassVar[CodeDtype] = "int8"  # of the codes

    def __post_init__(self) -> None:
        _check_block("QuantizedReduce", self.block)

    def granularity(self) -> GranularityPolicy:
        """What must not be cut, for ``combine`` with other policies."""
        return _granularity(self)


_Option: TypeAlias = QuantizedGather | QuantizedReduce


def check_quantized(gather: object, reduce: object, axes: Axes, device: torch.device) -> None:
    """Raise for invalid values of the options.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: ``device`` does not support the dtype, or no axis shards the gradients.
    """
    for name, kind, option in (
        ("gather_codec", QuantizedGather, gather),
        ("reduce_codec", QuantizedReduce, reduce),
    ):
        if option is not None and not isinstance(option, kind):
            raise TypeError(
                f"fully_shard: {name} must be a {kind.__name__}, got {option!r}; write "
                f"{name}={kind.__name__}(...)"
            )
    if isinstance(gather, QuantizedGather):
        _check_device(gather, device)
    if reduce is not None and axes.shard is None:
        raise ValueError(
            "fully_shard: reduce_codec=QuantizedReduce(...) needs gradients that are sharded, and "
            "sharding='ddp' shards nothing; use sharding='zero1'"
        )


def _check_device(gather: QuantizedGather, device: torch.device) -> None:
    if not is_offered(gather.dtype, device):
        other = "int8" if gather.dtype == "e4m3" else "e4m3"
        raise ValueError(
            f"fully_shard: gather_codec={gather.dtype!r} needs numbers of that dtype, which "
            f"{device.type} does not have in this torch; use QuantizedGather(dtype={other!r})"
        )


class Choice:
    """Decides for each parameter of some modules how it is sent.

    Args:
        modules: the modules of one unit.
        gather, reduce: ``gather_codec`` and ``reduce_codec`` of ``fully_shard``.
        device: of the unsharded parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        gather: QuantizedGather | None,
        reduce: QuantizedReduce | None,
        device: torch.device,
    ) -> None:
        self._gather, self._reduce, self._device = gather, reduce, device
        inside = (child for module in modules for child in module.modules())
        self._roles = Roles(modules, has_blocks=any(unit_of(child) for child in inside))

    def codings(
        self,
        fqn: str,
        param: nn.Parameter,
        sites: Sequence[Site],
        shape: Sequence[int],
        inner: DTensorSpec | None,
    ) -> tuple[Coding | None, Coding | None]:
        """Return the codings of a parameter for all-gather and reduction. None: not encoded.

        Args:
            shape: of this rank's data to shard.
            inner: the spec by inner parallelism.

        Raises:
            ValueError: a policy's choice is impossible, or inner parallelism splits blocks.
            TypeError: a policy returns a wrong type.
            NotImplementedError: inner parallelism would have to compute with codes.
        """
        gather = self._chosen(self._gather, fqn, param, sites)
        reduce = self._chosen(self._reduce, fqn, param, sites)
        if isinstance(gather, QuantizedGather) and gather is not self._gather:
            _check_device(gather, self._device)
        return _coding(gather, fqn, shape, inner), _coding(reduce, fqn, shape, inner)

    def _chosen(
        self, option: _Option | None, fqn: str, param: nn.Parameter, sites: Sequence[Site]
    ) -> _Option | None:
        if option is None:
            return None
        kind = type(option)
        answer: Any = None if option.policy is None else option.policy(fqn, param)
        if answer is None:
            wants = self._is_usual(option, fqn, param, sites)
            return option if wants and param.numel() >= _numel(option.block) else None
        if answer is False:
            return None
        if answer is True:
            answer = replace(option, policy=None)
        if not isinstance(answer, kind):
            raise TypeError(
                f"the policy of {kind.__name__} returned {answer!r} for {fqn!r}; expected a bool, "
                f"None or a {kind.__name__}"
            )
        _check_fits(answer, fqn, param)
        return answer

    def _is_usual(
        self, option: _Option, fqn: str, param: nn.Parameter, sites: Sequence[Site]
    ) -> bool:
        if isinstance(option, QuantizedReduce):
            return param.is_floating_point() and is_matrix(param.shape)
        owners = (module for ref, _ in sites if (module := ref()) is not None)
        return self._roles.is_hidden(fqn, param, owners)


def _granularity(option: _Option) -> GranularityPolicy:
    def policy(fqn: str, param: nn.Parameter) -> Granularity | None:
        answer: Any = None if option.policy is None else option.policy(fqn, param)
        chosen = answer if isinstance(answer, QuantizedGather | QuantizedReduce) else option
        is_usual = param.dim() >= 2 and param.numel() >= _numel(chosen.block)
        if answer is False or (answer is None and not is_usual) or not param.is_floating_point():
            return None
        return Granularity.elements(Blocks(chosen.block, tuple(param.shape)).unit)

    return policy


def _numel(block: BlockSize) -> int:
    return math.prod(block) if isinstance(block, tuple) else block


def _check_block(option: Literal["QuantizedGather", "QuantizedReduce"], block: object) -> None:
    extents = block if isinstance(block, tuple) else (block,)
    is_size = len(extents) in (1, 2) and isinstance(block, tuple) == (len(extents) == 2)
    if not is_size or any(type(n) is not int or n < 1 for n in extents):
        raise ValueError(
            f"{option}: block must be a positive int, or (rows, columns), got {block!r}"
        )


def _check_fits(option: _Option, fqn: str, param: nn.Parameter) -> None:
    kind = type(option).__name__
    if not param.is_floating_point():
        raise ValueError(
            f"the policy of {kind} chose {fqn!r}, which is of {param.dtype}: only floating-point "
            "numbers can be rounded. Return False for it"
        )
    if _numel(option.block) > param.numel():
        raise ValueError(
            f"the policy of {kind} chose {fqn!r}, but its shape {tuple(param.shape)} has fewer "
            f"elements than a block of {option.block}. Return False, or a {kind} with smaller "
            "blocks"
        )


def _coding(
    option: _Option | None, fqn: str, shape: Sequence[int], inner: DTensorSpec | None
) -> Coding | None:
    if option is None:
        return None
    if inner is not None:
        _check_inner(option, fqn, inner)
    decodes = isinstance(option, QuantizedReduce) or option.decode
    if not decodes and inner is not None:
        raise NotImplementedError(
            f"fully_shard: {fqn!r} is a DTensor of an inner parallelism, which computes with "
            "numbers and not with codes; use QuantizedGather(decode=True) for it"
        )
    return Coding(option.dtype, Blocks(option.block, tuple(shape)), decodes)


def _check_inner(option: _Option, fqn: str, inner: DTensorSpec) -> None:
    try:
        Blocks(option.block, tuple(inner.shape)).placements(inner.placements, inner.mesh.shape)
    except CutBlockError as error:
        raise ValueError(
            f"fully_shard: {fqn!r}, of shape {tuple(inner.shape)}, is a DTensor with "
            f"{inner.placements}, which cuts blocks of {option.block}: {error}. Choose blocks that "
            "it does not cut, or a policy that leaves the parameter out"
        ) from error


class ErrorFeedback:
    """The error feedback of one model on this rank.

    Args:
        model: some of its modules are sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): name for name, module in model.named_modules()}

        def name_of(fsdp_param: FSDPParam) -> str:
            names = [(modules.get(id(ref())), name) for ref, name in fsdp_param.sites]
            module, name = next(pair for pair in names if pair[0] is not None)
            return compat.fqn_of(model, f"{module}.{name}" if module else name)

        groups = [group for unit in units_in(model).values() for group in unit.groups]
        self._named: list[tuple[Gradients, dict[str, torch.Size]]] = [
            (
                group.gradients,
                {name_of(fsdp_param): fsdp_param.shape for fsdp_param in group.fsdp_params},
            )
            for group in groups
            if group.gradients.has_feedback
        ]

    def __bool__(self) -> bool:
        """Whether any parameter has error feedback."""
        return bool(self._named)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the errors by parameter, float32, [its shape]; {} before a reduction.

        They are views if nothing is frozen, else they may be copies. Frozen parameters have none.
        """
        return {
            list(names)[index]: error
            for gradients, names in self._named
            for index, error in gradients.residual_of().items()
        }

    def fits(self, shapes: Mapping[str, torch.Size]) -> bool:
        """Whether the shapes are those of its parameters."""
        own = {name: shape for _, named in self._named for name, shape in named.items()}
        return all(own.get(name, shape) == shape for name, shape in shapes.items())

    def replace(self, saved: Mapping[str, torch.Tensor]) -> list[Residuals]:
        """Replace the errors. Parameters without a value get zero.

        Returns:
            The old errors, for `restore`.

        Cost: memory for a second copy.
        """
        return [
            gradients.replace_residuals([saved.get(name) for name in names])
            for gradients, names in self._named
        ]

    def restore(self, before: list[Residuals]) -> None:
        """Undo `replace`."""
        for (gradients, _), residuals in zip(self._named, before, strict=True):
            gradients.residuals = residuals
