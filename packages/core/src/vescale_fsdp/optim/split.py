"""split_named_params: separates the matrices of hidden layers from all other parameters.

Optimizers such as Muon are for matrices that map one hidden vector to another. Embeddings and heads
have one row per token, and element-wise optimizers suit them better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from vescale_fsdp.engine import HEADS, may_be_hidden

NamedParams = list[tuple[str, nn.Parameter]]


def split_named_params(
    model: nn.Module, *, is_hidden: Callable[[str, nn.Parameter], bool | None] | None = None
) -> tuple[NamedParams, NamedParams]:
    """The usual split for Muon: matrices of hidden layers, and all other parameters.

    ::

        hidden, rest = split_named_params(model)
        optimizer = OptimizerGroup(muon=Muon(hidden), adamw=AdamW(rest))

    The rest has, in this order of rules:

    1. parameters without two dimensions of more than one element: biases, norms, scales, tokens;
    2. parameters that are not floating-point;
    3. parameters of embeddings, convolutions and norms, also if another module uses them too
       (a head that is tied to an embedding);
    4. parameters with a word in their name that begins with ``emb`` or ``position``, or is ``wte``
       or ``wpe``;
    5. heads outside of repeated blocks: linear layers with one row for each entry of an
       embedding, and parameters in a module named classifier, head, lm_head, logits, output, score
       or unembed;
    6. if these rules find no head: the last ``nn.Linear``, if outside of repeated blocks.

    All others are hidden: matrices, fused or not, and stacks of them, such as weights of experts.
    A repeated block is a member of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that has
    several of its class, other than ``nn.Linear``.

    Args:
        model: before or after `fully_shard`; the result has the same names in it.
        is_hidden: decides by name and parameter, before the rules; if it returns None, the rules
            decide.

    Returns:
        (name, parameter) pairs of the hidden matrices and of the rest, together those of
        ``model.named_parameters()``: tied parameters once, frozen ones too.
    """
    sites = list(_sites(model))
    heads = {id(site.param) for site in _heads(model, sites)}
    by_param: dict[int, list[_Site]] = {}
    for site in sites:
        by_param.setdefault(id(site.param), []).append(site)
    hidden: NamedParams = []
    rest: NamedParams = []
    for name, param in model.named_parameters():
        answer = None if is_hidden is None else is_hidden(name, param)
        if answer is None:
            answer = id(param) not in heads and all(map(_may_be_hidden, by_param[id(param)]))
        (hidden if answer else rest).append((name, param))
    return hidden, rest


class _Site(NamedTuple):
    """A use of a parameter. Tied ones have several."""

    parts: list[str]  # of its name in this module
    param: nn.Parameter
    module: nn.Module
    is_in_block: bool


def _sites(
    module: nn.Module, parts: tuple[str, ...] = (), in_block: bool = False
) -> Iterator[_Site]:
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield _Site([*parts, name], param, module, in_block)
    counts = Counter(map(type, module.children()))
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module._modules.items():
        if child is not None:
            is_alike = is_container and counts[type(child)] > 1 and not isinstance(child, nn.Linear)
            yield from _sites(child, (*parts, name), in_block or is_alike)


def _may_be_hidden(site: _Site) -> bool:
    return may_be_hidden(site.parts, site.param, site.module)


def _heads(model: nn.Module, sites: list[_Site]) -> list[_Site]:
    vocabularies = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    outside = [site for site in sites if not site.is_in_block]
    found = [site for site in outside if not HEADS.isdisjoint(site.parts)]
    linear = [site for site in outside if isinstance(site.module, nn.Linear)]
    found += [site for site in linear if site.param.shape[0] in vocabularies]
    if found:
        return found
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [site for site in linear if site.module is modules[-1]]
