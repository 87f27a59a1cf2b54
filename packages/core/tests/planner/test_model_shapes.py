"""Padding and time on the shapes of real models: one group per layer, alignment of 8 elements.

Figures are percent of padding over real elements. They are the exact optima for the order of
definition; no search can do better without changing the order.
"""

import time

import pytest

from vescale_fsdp.planner import TensorSpec, plan


def deepseek_v3_layer():
    """DeepSeek-V3-671B, a mixture-of-experts layer: 782 tensors."""
    yield "self_attn.q_a_proj", (1536, 7168)
    yield "self_attn.q_a_layernorm", (1536,)
    yield "self_attn.q_b_proj", (24576, 1536)
    yield "self_attn.kv_a_proj_with_mqa", (576, 7168)
    yield "self_attn.kv_a_layernorm", (512,)
    yield "self_attn.kv_b_proj", (32768, 512)
    yield "self_attn.o_proj", (7168, 16384)
    for expert in range(256):
        yield f"experts.{expert}.gate_proj", (2048, 7168)
        yield f"experts.{expert}.up_proj", (2048, 7168)
        yield f"experts.{expert}.down_proj", (7168, 2048)
    yield "gate", (256, 7168)
    yield "gate.e_score_correction_bias", (256,)
    yield "shared_experts.gate_proj", (2048, 7168)
    yield "shared_experts.up_proj", (2048, 7168)
    yield "shared_experts.down_proj", (7168, 2048)
    yield "input_layernorm", (7168,)
    yield "post_attention_layernorm", (7168,)


def gpt_oss_layer():
    """GPT-OSS-120B, a layer with fused experts."""
    yield "self_attn.sinks", (64,)
    yield "self_attn.q_proj", (4096, 2880)
    yield "self_attn.q_proj.bias", (4096,)
    yield "self_attn.k_proj", (512, 2880)
    yield "self_attn.k_proj.bias", (512,)
    yield "self_attn.v_proj", (512, 2880)
    yield "self_attn.v_proj.bias", (512,)
    yield "self_attn.o_proj", (2880, 4096)
    yield "self_attn.o_proj.bias", (2880,)
    yield "router", (128, 2880)
    yield "router.bias", (128,)
    yield "experts.gate_up_proj", (128, 2880, 5760)
    yield "gate_up_proj_bias", (128, 5760)
    yield "experts.down_proj", (128, 2880, 2880)
    yield "down_proj_bias", (128, 2880)
    yield "input_layernorm", (2880,)
    yield "post_attention_layernorm", (2880,)


def llama_3_layer():
    """Llama-3-70B, a layer."""
    yield "attention.wq", (8192, 8192)
    yield "attention.wk", (1024, 8192)
    yield "attention.wv", (1024, 8192)
    yield "attention.wo", (8192, 8192)
    yield "feed_forward.w1", (28672, 8192)
    yield "feed_forward.w2", (8192, 28672)
    yield "feed_forward.w3", (28672, 8192)
    yield "attention_norm", (8192,)
    yield "ffn_norm", (8192,)


def specs_of(layer, blocked, rows):
    """Tensors for which ``blocked(name, shape)`` keep ``rows`` rows of the last dim together."""
    return [
        TensorSpec(name, shape, rows * shape[-1] if blocked(name, shape) else 1)
        for name, shape in layer()
    ]


def experts(name, shape):
    return name.startswith("experts.")


def matrices(name, shape):
    return len(shape) > 1


@pytest.mark.parametrize(
    ("layer", "blocked", "rows", "percent"),
    [  # percent at 64, 256, 512, 1024 shards
        (deepseek_v3_layer, experts, 1, [0.00, 0.00, 0.02, 0.02]),
        (deepseek_v3_layer, experts, 16, [0.02, 0.02, 0.02, 0.02]),
        (deepseek_v3_layer, experts, 128, [0.02, 0.31, 2.06, 7.31]),
        (gpt_oss_layer, experts, 1, [0.01, 0.05, 0.05, 0.05]),
        (gpt_oss_layer, experts, 16, [0.05, 0.60, 1.33, 2.80]),
        (gpt_oss_layer, experts, 128, [1.33, 5.74, 5.74, 17.48]),
        (llama_3_layer, matrices, 1, [0.37, 1.22, 2.94, 2.94]),
        (llama_3_layer, matrices, 16, [2.94, 9.80, 9.80, 9.80]),
    ],
)
def test_padding_of_a_layer(layer, blocked, rows, percent):
    specs = specs_of(layer, blocked, rows)
    layouts = [plan(specs, num_shards, alignment=8) for num_shards in (64, 256, 512, 1024)]
    assert [round(100 * layout.padding_ratio, 2) for layout in layouts] == percent
    assert all(layout.exact for layout in layouts)


def test_rows_of_two_lengths_need_no_common_multiple():
    # ViT-L, rows of 588 and 1024 elements; cuts are multiples of 8, so 588 acts as 1176. If both
    # spanned, S would be a multiple of 150,528. Instead "position" has one cut inside, which
    # needs 263,168 <= S + S // 1024 * 1024; the first such multiple of 1176 is 113 * 1176.
    specs = [TensorSpec("patch", (1024, 588), 588), TensorSpec("position", (257, 1024), 1024)]
    layout = plan(specs, 8, alignment=8)
    assert layout.exact
    assert layout.shard_size == 132_888


@pytest.mark.parametrize("blocked", [experts, matrices])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_782_tensors_take_well_under_half_a_second(blocked, rows):
    specs = specs_of(deepseek_v3_layer, blocked, rows)
    assert len(specs) == 782
    for num_shards in (8, 64, 512, 1024, 4096):
        seconds = []
        for _ in range(3):  # the best of three: other work on the machine is not the planner's
            start = time.perf_counter()
            layout = plan(specs, num_shards, alignment=8)
            seconds.append(time.perf_counter() - start)
        assert layout.exact
        assert min(seconds) < 0.5
