"""What a parameter is for: whether it maps one hidden vector to another, as far as names tell.

Embeddings and heads map to or from one row per token, norms and biases are vectors. Optimizers for
matrices treat these otherwise, and so do gathers of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["HEADS", "may_be_hidden"]

# Names of modules that map hidden vectors to tokens or classes.
HEADS = frozenset(("classifier", "head", "lm_head", "logits", "output", "score", "unembed"))
_NOT_HIDDEN = (
    *(nn.Embedding, nn.EmbeddingBag, _ConvNd),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm),
)


def may_be_hidden(parts: Sequence[str], param: nn.Parameter, module: nn.Module) -> bool:
    """Whether a parameter is no vector, and is not of an embedding, a convolution or a norm.

    Args:
        parts: of its name.
        module: that has it.
    """
    if sum(extent > 1 for extent in param.shape) < 2 or not param.is_floating_point():
        return False
    if isinstance(module, _NOT_HIDDEN):
        return False
    words = [word for part in parts for word in part.lower().split("_")]
    return not any(word.startswith(("emb", "position")) or word in ("wte", "wpe") for word in words)
