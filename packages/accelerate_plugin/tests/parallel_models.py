"""A tiny Llama and a tiny Mixtral, and how one process trains them on the rows of all."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from vescale_fsdp import clip_grad_norm_

from .helpers import full

SIZES = {
    "vocab_size": 33,  # not a multiple of two ranks
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MAX_NORM = 0.5
STEPS = 3
ROWS = 4  # of one step, of all processes together


def make_llama(*, tied: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def make_mixtral(*, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def tokens_of_all() -> torch.Tensor:
    return torch.randint(32, (STEPS * ROWS, 8), generator=torch.Generator().manual_seed(1))


def loader(num_batches: int) -> Any:
    """Of ``num_batches`` processes that get different rows; in one step all rows are used."""
    return DataLoader(TensorDataset(tokens_of_all()), batch_size=ROWS // num_batches)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train_alone(model: Any) -> Trained:
    """Losses, norms and parameters of one process that trains on all rows."""
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for (tokens,) in loader(1):
        loss = loss_of(model, tokens)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: full(param) for name, param in model.named_parameters()}
