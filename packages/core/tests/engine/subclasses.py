"""Tensor subclasses that gather themselves, as users of FSDP2 write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .models import MLP, inputs_of, make

Sent = tuple[tuple[Tensor, ...], Any]  # inputs of a gather, and metadata
Made = tuple[Tensor, tuple[Tensor, ...]] | None  # the parameter, and what to free


class Wrapped(torch.Tensor):
    """Wraps tensors of one shape. Operators run on each, and give wrapped tensors again."""

    held: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, *held: Tensor) -> Wrapped:
        first = held[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )

    def __init__(self, *held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        count = max(len(leaf.held) for leaf in tree_leaves(given) if isinstance(leaf, Wrapped))
        results = []
        for index in range(count):
            own_args, own_kwargs = tree_map_only(Wrapped, lambda w, i=index: w.held[i], given)
            results.append(func(*own_args, **own_kwargs))
        leaves = [
            cls(*parts) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*map(tree_leaves, results), strict=True)
        ]
        result = tree_unflatten(leaves, tree_flatten(results[0])[1])
        return return_and_correct_aliasing(func, *given, result)

    def __tensor_flatten__(self) -> Any:
        return ["first"], None

    @property
    def first(self) -> Tensor:
        return self.held[0]

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, size: Any, stride: Any) -> Wrapped:
        raise NotImplementedError("nobody asks for it here")

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.held}"


class Narrow(Wrapped):
    """Gathers in bf16; forward sees the param_dtype."""

    pads = True

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Sent:
        rows = padded_rows(self.held[0], outer_size, mesh.size()) if self.pads else self.held[0]
        return (rows.bfloat16(),), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Made:
        (rows,) = outputs
        assert rows.dtype is torch.bfloat16
        if out is None:
            whole = rows.to(param_dtype)
            return whole, (rows, whole)
        write(out, rows)
        return None


class Coded(Wrapped):
    """Gathers 8-bit codes and one scale per row; the metadata say how many levels there are."""

    levels = 127

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Sent:
        rows = padded_rows(self.held[0], outer_size, mesh.size())
        return encoded(rows, self.levels), {"levels": self.levels}

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Made:
        assert metadata == {"levels": self.levels}
        codes, scale = outputs
        assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
        whole = (codes * scale).to(param_dtype)
        if out is None:
            return whole, (whole,)
        write(out, whole)
        return None


class Pair(Wrapped):
    """Two tensors, which both travel; forward sees a pair again. Takes the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Sent:
        return self.held, None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Made:
        if out is None:
            return Pair(*outputs).to(param_dtype), outputs
        for place, rows in zip(out.held, outputs, strict=True):
            if rows.dtype == param_dtype:  # no cast was made: it is there already
                assert place.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
            else:
                write(place, rows)
        return None


def padded_rows(held: Tensor, outer_size: torch.Size, num_ranks: int) -> Tensor:
    """The rows, and zeros up to the number that the first rank has."""
    missing = -(-outer_size[0] // num_ranks) - held.shape[0]
    return torch.cat([held, held.new_zeros(missing, *held.shape[1:])])


def encoded(rows: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits and a scale for each row."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / levels
    return (rows / scale).round().to(torch.int8), scale


def write(out: Tensor, rows: Tensor) -> None:
    """Write rows, of which the last may be padding, over a parameter that autograd has saved."""
    place = out._local_tensor if isinstance(out, DTensor) else out  # after tensor parallelism
    with _unsafe_preserve_version_counter(place):
        place.copy_(rows[: place.shape[0]])


def wrap_weights(model: nn.Module, subclass: type[Wrapped], num_held: int = 1) -> nn.Module:
    """Make the weights of all linear layers instances of ``subclass``. Biases stay plain."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            held = [layer.weight.detach().clone() for _ in range(num_held)]
            layer.weight = nn.Parameter(subclass(*held))
    return model


def made(subclass: type[Wrapped], width: int = 6) -> nn.Module:
    """Three linear layers with weights of ``subclass`` and plain biases."""
    return wrap_weights(make(MLP, 3, width), subclass, 2 if subclass is Pair else 1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(inputs_of(step, dist.get_rank(), model.layers[0].in_features)).square().mean()
