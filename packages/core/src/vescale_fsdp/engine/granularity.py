"""The granularity of parameters, and the roles of parameters and modules.

A granularity is the smallest part of a parameter that must stay on one rank. It turns the shape of
a parameter into the planner's block, in elements. A row is a run along the last dimension; in a
vector, a row is one element. Blocks are counted from the first element of the tensor. The last one
may be partial.

Roles are found by names and types. The matrix of a hidden layer maps one hidden vector to another.
Embeddings and heads have one row per token; norms and biases are vectors. Matrix optimizers and
8-bit all-gathers treat these in another way. Repeated blocks become units if the user does not
choose units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

_Part = tuple[str, int]


@dataclass(frozen=True)
class Granularity:
    """The blocks that must not be split. Made by `elements`, `rows`, `tile` and `whole`."""

    _parts: tuple[_Part, ...]

    @classmethod
    def elements(cls, n: int) -> Granularity:
        """Blocks of ``n`` consecutive elements (1: split anywhere)."""
        return cls((("elements", _positive("elements", n)),))

    @classmethod
    def rows(cls, n: int) -> Granularity:
        """Blocks of ``n`` rows."""
        return cls((("rows", _positive("rows", n)),))

    @classmethod
    def tile(cls, r: int, c: int) -> Granularity:
        """Tiles of r x c in the last two dimensions.

        A tile is not contiguous, so the r rows that it spans stay together. If r does not divide
        the second-last dimension of a stack of matrices, whole matrices stay together.
        """
        _positive("tile columns", c)
        return cls((("tile", _positive("tile rows", r)),))

    @classmethod
    def whole(cls) -> Granularity:
        """The tensor is never split."""
        return cls((("whole", 1),))

    def block(self, shape: Sequence[int]) -> int:
        """The block for a tensor of ``shape``, in elements: between 1 and its numel."""
        numel = math.prod(shape)
        if numel == 0:
            return 1
        return min(math.lcm(*(_block(part, tuple(shape)) for part in self._parts)), numel)


GranularityPolicy: TypeAlias = Callable[[str, nn.Parameter], Granularity | None]


def combine(*policies: Granularity | GranularityPolicy | None) -> GranularityPolicy:
    """A policy for all of ``policies``: its block is the least common multiple of their blocks."""
    for policy in policies:
        check_granularity(policy)

    def combined(fqn: str, param: nn.Parameter) -> Granularity | None:
        needs = [need for policy in policies if (need := _need(policy, fqn, param)) is not None]
        if not needs:
            return None
        return Granularity(tuple(part for need in needs for part in need._parts))

    return combined


def check_granularity(granularity: object) -> None:
    """Raise if ``granularity`` is not None, a Granularity or a policy."""
    if granularity is None or isinstance(granularity, Granularity) or callable(granularity):
        return
    if isinstance(granularity, int):
        raise TypeError(
            f"granularity={granularity} does not say what it counts; use "
            f"Granularity.elements({granularity}) or Granularity.rows({granularity})"
        )
    raise TypeError(
        "granularity must be a Granularity, or a policy (fqn, param) -> Granularity | None, got "
        f"{type(granularity).__name__}"
    )


def asked_block(
    granularity: Granularity | GranularityPolicy | None,
    fqn: str,
    param: nn.Parameter,
    shape: Sequence[int] | None = None,
) -> int | None:
    """The planner's block for one parameter, in elements. None: ``granularity`` asks for none.

    ``shape`` is the shape to shard, if another parallelism has sharded the parameter before.
    """
    need = _need(granularity, fqn, param)
    return None if need is None else need.block(param.shape if shape is None else shape)


def _need(
    granularity: Granularity | GranularityPolicy | None, fqn: str, param: nn.Parameter
) -> Granularity | None:
    if granularity is None or isinstance(granularity, Granularity):
        return granularity
    need = granularity(fqn, param)
    if need is not None and not isinstance(need, Granularity):
        raise TypeError(
            f"the granularity policy returned {need!r} for {fqn!r}; expected a Granularity or None"
        )
    return need


def _block(part: _Part, shape: tuple[int, ...]) -> int:
    kind, count = part
    numel = math.prod(shape)
    if kind == "elements":
        return count
    if kind == "whole":
        return numel
    row = shape[-1] if len(shape) >= 2 else 1
    if kind == "tile" and len(shape) >= 3 and shape[-2] % count:
        return shape[-2] * row
    return count * row


def _positive(what: str, n: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"Granularity: the number of {what} must be a positive int, got {n!r}")
    return n


# Names of modules that map hidden vectors to tokens or classes.
HEADS = frozenset(("classifier", "head", "lm_head", "logits", "output", "score", "unembed"))
_NOT_HIDDEN = (
    *(nn.Embedding, nn.EmbeddingBag),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether at least two dimensions have more than one element."""
    return sum(extent > 1 for extent in shape) > 1


def may_be_hidden(parts: Sequence[str], param: nn.Parameter, module: nn.Module) -> bool:
    """Whether a parameter is not a vector, and not of an embedding, a convolution or a norm.

    Args:
        parts: the parts of its name.
        module: the module that has it.
    """
    if not is_matrix(param.shape) or not param.is_floating_point():
        return False
    return not isinstance(module, _NOT_HIDDEN) and is_hidden_name(parts)


def is_hidden_name(parts: Sequence[str]) -> bool:
    """Whether no word of a name is one for an embedding."""
    words = [word for part in parts for word in part.lower().split("_")]
    return not any(word.startswith(("emb", "position")) or word in ("wte", "wpe") for word in words)


class Roles:
    """Finds the parameters of some modules that belong to hidden layers.

    A head is found by its name or its number of rows, outside of repeated blocks. Inside of blocks,
    other layers may have the same names; so there is no head if there is no embedding and no block.

    Args:
        modules: the modules that are sharded together.
        has_blocks: whether there are other units inside of them.
    """

    def __init__(self, modules: Sequence[nn.Module], *, has_blocks: bool) -> None:
        embeddings = [
            child
            for module in modules
            for child in module.modules()
            if isinstance(child, nn.Embedding | nn.EmbeddingBag)
        ]
        self._vocabularies = {child.num_embeddings for child in embeddings}
        self._may_have_head = bool(embeddings) or has_blocks

    def is_hidden(self, fqn: str, param: nn.Parameter, owners: Iterable[nn.Module]) -> bool:
        """Whether a parameter is not a vector, and not of an embedding, head, convolution or norm.

        Args:
            fqn: its name, relative to the modules.
            owners: all modules that have it.
        """
        parts = fqn.split(".")
        is_outside = self._may_have_head and not any(part.isdigit() for part in parts)
        has_rows = bool(param.shape) and param.shape[0] in self._vocabularies
        if is_outside and (has_rows or not HEADS.isdisjoint(parts)):
            return False
        return all(may_be_hidden(parts, param, owner) for owner in owners)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, the usual units of ``fully_shard``.

    Modules whose class the model names in ``_no_split_modules`` (as ``transformers`` does), or
    else the members of each ``ModuleList`` or ``Sequential`` that holds several parametrized
    modules of one class. Blocks inside blocks are ignored.
    """
    names = {
        name
        for child in module.modules()
        for name in (getattr(child, "_no_split_modules", None) or ())
    }
    found: dict[int, nn.Module] = {}
    _collect(module, names, set(), found)
    return callable_units(module, list(found.values()))


# Modules of torch that read parameters of their children without calling them, so that no hook of
# the child unshards them. By names, because most of `torch.ao` is not imported.
_READ_BY_PARENTS = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "torch.nn.modules.loss.LinearCrossEntropyLoss": ("linear",),
    # The fast path of evaluation; training calls them.
    "torch.nn.modules.transformer.TransformerEncoderLayer": (
        *("self_attn", "linear1", "linear2", "norm1", "norm2"),
    ),
    "torch.ao.nn.intrinsic.qat.modules.conv_fused._ConvBnNd": ("bn",),
    "torch.ao.nn.intrinsic.qat.modules.linear_fused.LinearBn1d": ("bn",),
}


def callable_units(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules to make units of: in place of one that its parent only reads, the parent.

    ``nn.MultiheadAttention`` computes with ``self.out_proj.weight`` and does not call ``out_proj``,
    so that no hook could unshard it. This knows the modules of torch that do so. For others the
    first forward raises an error that names both modules.

    Args:
        model: the modules are in it. It is not returned.
        modules: those that a policy has chosen, inner ones first.
    """
    readers: dict[int, nn.Module] = {}
    for parent in model.modules():
        for cls in type(parent).__mro__:
            for name in _READ_BY_PARENTS.get(f"{cls.__module__}.{cls.__qualname__}", ()):
                read = getattr(parent, name, None)
                for each in read.modules() if isinstance(read, nn.Module) else ():
                    readers.setdefault(id(each), parent)  # the outermost one comes first
    if readers.keys().isdisjoint(map(id, modules)):
        return list(modules)
    wanted = {id(readers.get(id(each), each)) for each in modules}
    return [each for each in reversed(list(model.modules())[1:]) if id(each) in wanted]


def _collect(
    current: nn.Module, names: set[str], seen: set[int], found: dict[int, nn.Module]
) -> None:
    repeated = _repeated_classes(current)
    for child in current.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        is_block = type(child).__name__ in names if names else type(child) in repeated
        if is_block and _has_parameters(child):
            found[id(child)] = child
        else:
            _collect(child, names, seen, found)


def _repeated_classes(container: nn.Module) -> set[type]:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return set()
    counts = Counter(type(child) for child in container.children() if _has_parameters(child))
    containers = (nn.ModuleList, nn.ModuleDict)
    return {cls for cls, count in counts.items() if count > 1 and not issubclass(cls, containers)}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
