"""torchtitan's Llama and DeepSeek-V3 debug models, sharded by its own code, beside one process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import vescale_fsdp
from vescale_fsdp.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from vescale_fsdp.testing import run_ranks

from .helpers import Steps, check, random_tokens


def debug_model(name: str) -> Any:
    """The config of a debug model. FlexAttention, its default, has no backward on CPU."""
    from torchtitan.models.common import ScaledDotProductAttention

    config = import_module(f"torchtitan.models.{name}").model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def whole_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = debug_model(name).build()
    model.init_weights(buffer_device=torch.device("cpu"))  # type: ignore[operator]
    return model


def sharded_model(name: str) -> nn.Module:
    """As torchtitan's Trainer makes it: on meta, sharded, emptied, initialised."""
    import torchtitan.distributed.fsdp as titan

    titan.fully_shard = vescale_fsdp.fully_shard  # type: ignore[assignment]
    with torch.device("meta"):
        model: nn.Module = debug_model(name).build()
    titan.apply_fsdp_to_decoder(
        model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False,
    )  # fmt: skip
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))  # type: ignore[operator]
    # whose random numbers are others. Its hook puts wq, wk and wv into one.
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole_model(name).state_dict(), options=options)
    return model


def whole_norm(model: nn.Module) -> float:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]
    return float(sum(each.double().square().sum() for each in wholes)) ** 0.5


def train(name: str, is_sharded: bool) -> Steps:
    """Losses of the whole batch, and gradient norms."""
    from torchtitan.distributed.utils import clip_grad_norm_

    model = sharded_model(name) if is_sharded else whole_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    tokens = random_tokens(4, 17, vocab_size=2048)
    mine = tokens.chunk(2)[dist.get_rank()] if is_sharded else tokens
    steps = []
    for _ in range(3):
        logits = model(mine[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, mine[:, 1:].flatten(), reduction="sum")
        loss = loss / tokens[:, 1:].numel()  # all ranks' tokens: torchtitan has gradients summed
        loss.backward()
        norm = whole_norm(model)  # torchtitan's is of fp32 sums: 5e-5 beside this one
        clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_sharded:
            total = loss.detach()
            dist.all_reduce(total)
        steps.append((loss.item(), norm))
    return steps


def beside_one_process(name: str) -> tuple[Steps, Steps]:
    return train(name, True), train(name, False)


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_debug_models_train_as_in_one_process(name: str) -> None:
    found, expected = run_ranks(beside_one_process, 2, name, timeout_s=80)[0]
    check(found, expected, rel=1e-5)
