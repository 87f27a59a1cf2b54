"""Tools for tests of code that uses veScale-FSDP: they run a function on a few local ranks.

::

    from vescale_fsdp.testing import run_ranks


    def sum_of_ranks() -> float:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()


    def test_sum():
        assert run_ranks(sum_of_ranks, 3) == [3.0, 3.0, 3.0]
"""

from __future__ import annotations

from vescale_fsdp.testing.helpers import assert_equal_across_ranks, free_port
from vescale_fsdp.testing.ranks import RankError, run_ranks
from vescale_fsdp.testing.worker import RankFailure

__all__ = ["RankError", "RankFailure", "assert_equal_across_ranks", "free_port", "run_ranks"]
