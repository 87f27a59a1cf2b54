"""Small models of transformers, one unit for each layer, train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

transformers: Any = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {
    **{key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "image_size": 16,
    "patch_size": 8,
}
Make = Callable[[], nn.Module]


def text(name: str, **config: Any) -> Make:
    """A model with a head for its own kind of language."""

    def make() -> nn.Module:
        made = getattr(transformers, f"{name}Config")(**config)
        kinds = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
        kind = next(each for each in kinds if hasattr(transformers, name + each))
        model: nn.Module = getattr(transformers, name + kind)(made)
        return model

    return make


def backbone(name: str, **config: Any) -> Make:
    """Feature maps, which are what hooks of the layers keep."""
    return lambda: transformers.AutoBackbone.from_config(
        getattr(transformers, f"{name}Config")(**config)
    )


EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
T5: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
}
MODELS: dict[str, Make] = {
    "llama": text("Llama", **GROUPED),
    "qwen3": text("Qwen3", **GROUPED, head_dim=8),
    "gemma2": text("Gemma2", **GROUPED, head_dim=8),
    "mixtral": text("Mixtral", **EXPERTS),
    "gpt_oss": text("GptOss", **EXPERTS, head_dim=8),
    "gpt2": text("GPT2", vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "mamba": text("Mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8),
    "bert": text("Bert", **TEXT),
    "albert": text("Albert", **TEXT, embedding_size=16),
    "t5": text("T5", **T5),
    "bart": text("Bart", **BART),
    "dinov2": backbone("Dinov2", **IMAGE),
    "beit": backbone("Beit", **IMAGE, intermediate_size=48, drop_path_rate=0.0),
    "vitdet": backbone("VitDet", **IMAGE, pretrain_image_size=16, drop_path_rate=0.0),
}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of lists, the inner ones first, as a script for FSDP2 wraps them."""
    found = [
        layer
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for layer in module
        if any(True for _ in layer.parameters())
    ]
    return list({id(layer): layer for layer in reversed(found)}.values())


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    if hasattr(model, "channels"):  # a backbone
        maps = model(torch.randn(2, 3, 16, 16, generator=generator)).feature_maps
        return torch.stack([each.square().mean() for each in maps]).sum()
    tokens = torch.randint(4, 60, (2, 8), generator=generator)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train(model: nn.Module, ranks: list[int]) -> dict[str, Tensor]:
    """The values after two steps on the batches of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        for rank in ranks:
            (loss_of(model, step, rank) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    values: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in values.items()
    }


def compare(name: str) -> None:
    before = {key: value.detach() for key, value in make(name).named_parameters()}
    expected = train(make(name), list(range(dist.get_world_size())))
    model = make(name)
    for layer in layers_of(model):
        fully_shard(layer)
    found = train(fully_shard(model), [dist.get_rank()])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        moved = (value - before[key]).abs().max()
        error = (found[key] - value).abs().max()
        assert error <= 1e-3 * moved + 1e-6, (key, error, moved)


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_in_one_process(name: str) -> None:
    run_ranks(compare, 2, name)
