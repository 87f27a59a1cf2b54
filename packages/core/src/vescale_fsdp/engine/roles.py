"""Finds the matrices of hidden layers and the repeated blocks of a model, by names and types.

The matrix of a hidden layer maps one hidden vector to another. Embeddings and heads have one row
per token; norms and biases are vectors. Matrix optimizers and 8-bit all-gathers treat these in
another way. Repeated blocks become units if the user does not choose units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

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
    return list(found.values())


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
