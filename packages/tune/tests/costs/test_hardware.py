"""Published hardware, and the paper's Table 1 computed from it."""

from __future__ import annotations

import pytest

from vescale_fsdp_tune.costs.hardware import HARDWARE, published

# A layer of GPT-OSS-120B has 3,213,080,192 elements; bf16 weights, fp32 gradients, 64 ranks.
ELEMENTS = 3_213_080_192


def test_a_collective_of_many_nodes_uses_all_cards_of_a_node() -> None:
    h100 = published("h100").machine(network_share=1.0)
    assert h100.link(8).bytes_per_s == 450e9
    assert h100.link(64).bytes_per_s == 400e9  # 8 cards of 50 GB/s
    assert h100.link(8, stride=8).bytes_per_s == 50e9  # replicas of a node


def test_the_network_of_h800_is_limited_by_nvlink() -> None:
    assert published("h800").machine(network_share=1.0).link(64).bytes_per_s == 200e9


@pytest.mark.parametrize(("itemsize", "measured_s"), [(2, 43.7e-3), (4, 94.2e-3)])
def test_collectives_of_the_papers_table_1(itemsize: int, measured_s: float) -> None:
    link = published("h800").machine().link(64)
    computed = link.seconds(ELEMENTS * itemsize * 63 // 64, 64)
    assert computed == pytest.approx(measured_s, rel=0.06)


def test_the_copy_out_of_the_papers_table_1() -> None:
    machine = published("h800").machine()
    read_and_written = 2 * 2 * ELEMENTS
    assert read_and_written / machine.copy_bytes_per_s == pytest.approx(5.2e-3, rel=0.01)


def test_each_has_sources_and_its_own_name() -> None:
    assert all(name == each.name and each.sources for name, each in HARDWARE.items())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="h100, h200, b200, h800; got 'h900'"):
        published("h900")
