"""What a parameter is for: whether it maps one hidden vector to another, as far as names tell.

Embeddings and heads map to or from one row per token, norms and biases are vectors. Optimizers for
matrices treat these otherwise, and so do gathers of 8 bits.
"""

from __future__ import annotations

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


def may_be_hidden(parts: Sequence[str], param: nn.Parameter, module: nn.Module) -> bool:
    """Whether a parameter is no vector, and is not of an embedding, a convolution or a norm.

    Args:
        parts: of its name.
        module: that has it.
    """
    if sum(extent > 1 for extent in param.shape) < 2 or not param.is_floating_point():
        return False
    return not isinstance(module, _NOT_HIDDEN) and is_hidden_name(parts)


def is_hidden_name(parts: Sequence[str]) -> bool:
    """Whether no word of a name says that it is of an embedding."""
    words = [word for part in parts for word in part.lower().split("_")]
    return not any(word.startswith(("emb", "position")) or word in ("wte", "wpe") for word in words)


class Roles:
    """Which parameters of some modules belong to hidden layers, as far as these modules show it.

    A head is told by its name or its rows, outside of repeated blocks. Names of heads are those of
    other layers too, deep inside of a block; so without an embedding or a block there is no head.

    Args:
        modules: that are sharded together.
        has_blocks: whether other units are inside of them.
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
        """Whether a parameter is no vector, and of no embedding, head, convolution or norm.

        Args:
            fqn: relative to the modules.
            owners: all modules that have it.
        """
        parts = fqn.split(".")
        is_outside = self._may_have_head and not any(part.isdigit() for part in parts)
        has_rows = bool(param.shape) and param.shape[0] in self._vocabularies
        if is_outside and (has_rows or not HEADS.isdisjoint(parts)):
            return False
        return all(may_be_hidden(parts, param, owner) for owner in owners)
