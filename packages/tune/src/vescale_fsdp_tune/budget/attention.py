"""Fused attention on the meta device: ``scaled_dot_product_attention`` as the devices compute it.

On the meta device torch would make a matrix of all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


@contextmanager
def fused_attention(*, is_accelerator: bool) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` save what its fused kernels save.

    Args:
        is_accelerator: whose kernels also have dropout, and values of another width. On CPUs torch
            computes these from the matrix of all pairs.
    """
    original = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Any:
        is_fused = query.dim() == 4 and not (attn_mask is not None and attn_mask.requires_grad)
        if not is_accelerator:
            is_fused &= dropout_p == 0 and query.shape[-1] == value.shape[-1]
        if not is_fused:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]

    class ByName(TorchFunctionMode):  # for modules that have imported the function by name
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (attend if func is original else func)(*args, **(kwargs or {}))

    # A mode is suspended within torch's functions of Python, such as multi_head_attention_forward.
    with mock.patch.object(F, "scaled_dot_product_attention", attend), ByName():
        yield


class _Attention(torch.autograd.Function):
    """Shapes of fused attention: it saves its inputs, its output, and one number for each row."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,  # [batch, heads, tokens, width]
        key: torch.Tensor,
        value: torch.Tensor,  # [batch, heads, tokens, width of the output]
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return (*(torch.empty_like(each) for each in (query, key, value)), None)
