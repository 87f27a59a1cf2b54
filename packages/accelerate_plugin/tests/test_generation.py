"""``generate`` of a transformers model, with another number of tokens on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from vescale_fsdp import generating
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin

from .helpers import accelerator


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, **sizes)
    )


def t5() -> Any:
    """Its encoder runs by itself, before the loop."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def check(make: Any, block: str, limit: int | None) -> None:
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(transformer_cls_names_to_wrap=[block])) as acc:
        plain = make().eval()
        model = acc.prepare(make()).eval()
        rank = acc.process_index
        prompt = torch.tensor([[3, 4 + rank, 5]])
        calls: list[object] = []
        model.register_forward_hook(lambda *_: calls.append(None))
        for lengths in ([(2,), (9, 1, 3)], [(7, 2), (1,)], [(4,), ()]):
            with generating(model, max_unsharded_bytes=limit):
                for length in lengths[rank]:  # another number of times, too
                    options = {"min_new_tokens": length, "max_new_tokens": length}
                    for more in ({"do_sample": False}, {"num_beams": 2}):
                        calls.clear()
                        found = model.generate(prompt, **options, **more)
                        assert len(calls) == length  # no forward for other ranks
                        assert torch.equal(found, plain.generate(prompt, **options, **more))
        assert model._is_fsdp_managed_module


@pytest.mark.parametrize("limit", [None, 0])
def test_a_decoder_generates(limit: int | None) -> None:
    run_ranks(check, 2, llama, "LlamaDecoderLayer", limit)


@pytest.mark.parametrize("limit", [None, 0])
def test_an_encoder_and_a_decoder_generate(limit: int | None) -> None:
    run_ranks(check, 2, t5, "T5Block", limit)
