"""Shapes of real models, one communication group per layer, and the blocks of the tests."""

from vescale_fsdp.planner import TensorSpec

ROWS = (1, 16, 32, 128)
RANKS = tuple(8 << k for k in range(10))  # 8 to 4096
ALIGNMENT = 8  # elements


def deepseek_v3_attention():
    yield "self_attn.q_a_proj.weight", (1536, 7168)
    yield "self_attn.q_a_layernorm.weight", (1536,)
    yield "self_attn.q_b_proj.weight", (24576, 1536)
    yield "self_attn.kv_a_proj_with_mqa.weight", (576, 7168)
    yield "self_attn.kv_a_layernorm.weight", (512,)
    yield "self_attn.kv_b_proj.weight", (32768, 512)
    yield "self_attn.o_proj.weight", (7168, 16384)


def deepseek_v3_dense_layer():
    """DeepSeek-V3-671B, one of the first three layers."""
    yield from deepseek_v3_attention()
    yield "mlp.gate_proj.weight", (18432, 7168)
    yield "mlp.up_proj.weight", (18432, 7168)
    yield "mlp.down_proj.weight", (7168, 18432)
    yield "input_layernorm.weight", (7168,)
    yield "post_attention_layernorm.weight", (7168,)


def deepseek_v3_moe_layer():
    """DeepSeek-V3-671B, a mixture-of-experts layer: 782 tensors."""
    yield from deepseek_v3_attention()
    for expert in range(256):
        yield f"mlp.experts.{expert}.gate_proj.weight", (2048, 7168)
        yield f"mlp.experts.{expert}.up_proj.weight", (2048, 7168)
        yield f"mlp.experts.{expert}.down_proj.weight", (7168, 2048)
    yield "mlp.gate.weight", (256, 7168)
    yield "mlp.gate.e_score_correction_bias", (256,)
    yield "mlp.shared_experts.gate_proj.weight", (2048, 7168)
    yield "mlp.shared_experts.up_proj.weight", (2048, 7168)
    yield "mlp.shared_experts.down_proj.weight", (7168, 2048)
    yield "input_layernorm.weight", (7168,)
    yield "post_attention_layernorm.weight", (7168,)


def deepseek_v3_root():
    yield "embed_tokens.weight", (129280, 7168)
    yield "norm.weight", (7168,)
    yield "lm_head.weight", (129280, 7168)


def gpt_oss_hf_layer():
    """GPT-OSS-120B as Hugging Face has it, a layer with fused experts."""
    yield "self_attn.sinks", (64,)
    yield "self_attn.q_proj.weight", (4096, 2880)
    yield "self_attn.q_proj.bias", (4096,)
    yield "self_attn.k_proj.weight", (512, 2880)
    yield "self_attn.k_proj.bias", (512,)
    yield "self_attn.v_proj.weight", (512, 2880)
    yield "self_attn.v_proj.bias", (512,)
    yield "self_attn.o_proj.weight", (2880, 4096)
    yield "self_attn.o_proj.bias", (2880,)
    yield "mlp.router.weight", (128, 2880)
    yield "mlp.router.bias", (128,)
    yield "mlp.experts.gate_up_proj", (128, 2880, 5760)
    yield "mlp.experts.gate_up_proj_bias", (128, 5760)
    yield "mlp.experts.down_proj", (128, 2880, 2880)
    yield "mlp.experts.down_proj_bias", (128, 2880)
    yield "input_layernorm.weight", (2880,)
    yield "post_attention_layernorm.weight", (2880,)


def gpt_oss_hf_root():
    yield "embed_tokens.weight", (201088, 2880)
    yield "norm.weight", (2880,)
    yield "lm_head.weight", (201088, 2880)


def gpt_oss_openai_layer():
    """GPT-OSS-120B as OpenAI has it."""
    yield "attn.sinks", (64,)
    yield "attn.norm.scale", (2880,)
    yield "attn.qkv.weight", (5120, 2880)
    yield "attn.qkv.bias", (5120,)
    yield "attn.out.weight", (2880, 4096)
    yield "attn.out.bias", (2880,)
    yield "mlp.norm.scale", (2880,)
    yield "mlp.gate.weight", (128, 2880)
    yield "mlp.gate.bias", (128,)
    yield "mlp.experts.mlp1_weight", (128, 5760, 2880)
    yield "mlp.experts.mlp1_bias", (128, 5760)
    yield "mlp.experts.mlp2_weight", (128, 2880, 2880)
    yield "mlp.experts.mlp2_bias", (128, 2880)


def gpt_oss_openai_root():
    yield "embedding.weight", (201088, 2880)
    yield "norm.scale", (2880,)
    yield "unembedding.weight", (201088, 2880)


def llama_3_layer():
    """Llama-3-70B, a layer."""
    yield "attention.wq.weight", (8192, 8192)
    yield "attention.wk.weight", (1024, 8192)
    yield "attention.wv.weight", (1024, 8192)
    yield "attention.wo.weight", (8192, 8192)
    yield "feed_forward.w1.weight", (28672, 8192)
    yield "feed_forward.w2.weight", (8192, 28672)
    yield "feed_forward.w3.weight", (28672, 8192)
    yield "attention_norm.weight", (8192,)
    yield "ffn_norm.weight", (8192,)


def llama_3_root():
    yield "tok_embeddings.weight", (128256, 8192)
    yield "norm.weight", (8192,)
    yield "output.weight", (128256, 8192)


GROUPS = (
    deepseek_v3_dense_layer,
    deepseek_v3_moe_layer,
    deepseek_v3_root,
    gpt_oss_hf_layer,
    gpt_oss_hf_root,
    gpt_oss_openai_layer,
    gpt_oss_openai_root,
    llama_3_layer,
    llama_3_root,
)


def experts(name, shape):
    return ".experts." in name and len(shape) > 1 and not name.endswith("bias")


def matrices(name, shape):
    return len(shape) > 1


def specs_of(group, blocked, rows):
    """Tensors for which ``blocked(name, shape)`` keep ``rows`` rows of the last dim together."""
    return [
        TensorSpec(name, shape, rows * shape[-1] if blocked(name, shape) else 1)
        for name, shape in group()
    ]
