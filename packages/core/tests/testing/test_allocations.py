"""The allocator's account of what a function requests."""

from __future__ import annotations

import torch

from ..allocations import peak_of, traced


def test_peak_counts_what_is_there_at_a_time_and_knows_what_is_left() -> None:
    kept = []

    def run() -> None:
        first = torch.empty(1000)  # 4,000 bytes
        second = torch.empty(500)
        del first
        second.untyped_storage().resize_(0)
        kept.append(torch.empty(250))

    blocks = traced(run)
    peak, at_peak = peak_of(blocks)
    assert peak == 6000
    assert at_peak == {4000: 1, 2000: 1}
    assert [block.num_bytes for block in blocks if block.end is None] == [1000]
