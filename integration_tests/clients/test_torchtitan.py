"""torchtitan's Llama and DeepSeek-V3 debug models, sharded by its own code, beside FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import vescale_fsdp
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import Steps, check, random_tokens

pytest.importorskip("torchtitan")


def train_one(name: str, fully_shard: Callable[..., Any]) -> Steps:
    """As torchtitan's Trainer: made on the meta device, sharded, emptied, filled, trained."""
    import torchtitan.distributed.fsdp as titan
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.common import ScaledDotProductAttention

    titan.fully_shard = fully_shard  # type: ignore[assignment]
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    for layer in spec.model.layers:  # FlexAttention, the default, has no backward on CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    whole = spec.model.build()
    whole.init_weights(buffer_device=torch.device("cpu"))
    with torch.device("meta"):
        model = spec.model.build()
    titan.apply_fsdp_to_decoder(
        model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False,
    )  # fmt: skip
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))  # of a seed each engine draws its own
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole.state_dict(), options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    tokens = random_tokens(4, 17, vocab_size=2048)
    inputs, labels = (part.chunk(2)[dist.get_rank()] for part in (tokens[:, :-1], tokens[:, 1:]))
    steps = []
    for _ in range(3):
        logits = model(inputs).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        loss = loss / (2 * labels.numel())  # all ranks' tokens: torchtitan has gradients summed
        loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


def train(name: str) -> tuple[Steps, Steps]:
    return train_one(name, vescale_fsdp.fully_shard), train_one(name, stock_fully_shard)


@pytest.mark.xfail(
    strict=True,
    raises=RankError,
    reason="to_empty() after fully_shard([norm, lm_head]): Cannot swap t1 because it has weakref",
)
@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_debug_models_train_as_with_fsdp2(name: str) -> None:
    found, expected = run_ranks(train, 2, name, timeout_s=50)[0]
    check(found, expected, rel=1e-5)
