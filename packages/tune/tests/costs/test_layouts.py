"""What FSDP2 and Megatron-FSDP v2 pay, on the groups for which PAPER.md gives measured figures."""

import pytest

from vescale_fsdp.planner import TensorSpec
from vescale_fsdp_tune.costs.layouts import fsdp2_shard_size, megatron_shard_size

from ....core.tests.planner.shapes import gpt_oss_hf_layer


def specs_of(*shapes):
    return [TensorSpec(str(i), shape, 1) for i, shape in enumerate(shapes)]


GPT_OSS_LAYER = [TensorSpec(name, shape, 1) for name, shape in gpt_oss_hf_layer()]
# Eight experts of a DeepSeek-V3 layer on one rank of expert parallelism, fused to three tensors.
DEEPSEEK_LOCAL_EXPERTS = specs_of((8, 2048, 7168), (8, 2048, 7168), (8, 7168, 2048))


def percent(shard_size, num_shards, specs):
    num_elements = sum(spec.numel for spec in specs)
    return 100 * (num_shards * shard_size - num_elements) / num_elements


@pytest.mark.parametrize(("num_shards", "expected"), [(64, 0), (256, 99), (512, 298)])
def test_fsdp2_on_a_gpt_oss_layer(num_shards, expected):
    """Experts are 128 along dimension 0: over 256 ranks, half of the ranks hold padding."""
    shard_size = fsdp2_shard_size(GPT_OSS_LAYER, num_shards)
    assert round(percent(shard_size, num_shards, GPT_OSS_LAYER)) == expected


def test_fsdp2_pads_each_tensor_by_itself():
    # 4 rows over 3 ranks: 2 each, of 5 elements; 7 elements: 3 each; a scalar: 1 each.
    assert fsdp2_shard_size(specs_of((4, 5), (7,), (), (0, 9)), 3) == 10 + 3 + 1


def test_megatron_on_a_gpt_oss_layer():
    """Rows of 2880 * 5760 elements are the least common multiple; 3.03 of them are 1/64."""
    shard_size = megatron_shard_size(GPT_OSS_LAYER, 64)
    assert shard_size == 4 * 2880 * 5760
    assert round(percent(shard_size, 64, GPT_OSS_LAYER)) == 32


def test_megatron_on_eight_local_deepseek_experts():
    """A row is an expert: 24 rows over 256 ranks, one each."""
    shard_size = megatron_shard_size(DEEPSEEK_LOCAL_EXPERTS, 256)
    assert shard_size == 2048 * 7168
    assert round(percent(shard_size, 256, DEEPSEEK_LOCAL_EXPERTS)) == 967


def test_megatron_on_embeddings_of_vit_large():
    """ViT-L/14: rows of 3 * 14 * 14 = 588 and 257 * 1024 share little: 147 * 257 * 1024."""
    specs = specs_of((1, 1, 1024), (1, 257, 1024), (1024, 3, 14, 14), (1024,))
    shard_size = megatron_shard_size(specs, 8)
    assert shard_size == 147 * 257 * 1024
    assert round(percent(shard_size, 8, specs)) == 35_583


def test_megatron_fills_the_hole_behind_a_tensor():
    # L = 12. First 12 elements, then 16 and a hole from 28 to 36. The other 16 have a remainder of
    # 4 and start at 32, so one of five fragments of 4 fits before them. They end at 48, the other
    # four fragments at 64, and that is padded to 72. With two fragments in the hole it were 60.
    specs = specs_of((2, 6), (4, 4), (4, 4), *5 * [(1, 4)])
    assert megatron_shard_size(specs, 1) == 72
    # Over 5 ranks, S is the next multiple of 12 above 64 / 5.
    assert megatron_shard_size(specs, 5) == 24


def test_megatron_starts_tensors_at_multiples_of_their_rows():
    # 16 elements leave a hole from 16 to 24. The row of 6 starts at 18, so that none of the seven
    # rows of 2 goes there: 24 + 14 = 38, and 48 is the next multiple of L = 12.
    specs = specs_of((4, 4), (1, 6), *7 * [(1, 2)])
    assert megatron_shard_size(specs, 1) == 48


def test_megatron_without_elements():
    assert megatron_shard_size([], 8) == 0
    assert megatron_shard_size(specs_of((0, 4), (3, 0)), 8) == 0
