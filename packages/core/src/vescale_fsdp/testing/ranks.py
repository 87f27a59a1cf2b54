"""``run_ranks``: call a function on every rank of a local gloo group, and collect the results.

There is one pool of ranks per world size, which lives as long as this process. So a call creates a
process group, but starts no processes. After any failure the pool is killed, because its ranks may
wait in collectives that the failed rank will never join.
"""

from __future__ import annotations

import atexit
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from vescale_fsdp.testing.pool import Pool
from vescale_fsdp.testing.worker import RankFailure, dump

Result = TypeVar("Result")

_pools: dict[int, Pool] = {}


class RankError(Exception):
    """One or more ranks raised, died or did not finish in time.

    The first failure to arrive is most likely the cause; the others often follow from it.

    Attributes:
        failures: one ``RankFailure`` per failing rank, in the order in which they arrived.
        rank: the rank of the first failure.
        type_name: the name of the exception's type, for example ``"ValueError"``. It is
            ``"RankDied"`` or ``"RankHung"`` if the rank sent no exception.
        message: the exception's text.
        traceback: the traceback. For a rank that died or hung: what it printed last.
    """

    def __init__(self, failures: list[RankFailure], world_size: int) -> None:
        assert failures, "a RankError needs at least one failure"
        self.failures = failures
        self.world_size = world_size
        first = failures[0]
        self.rank = first.rank
        self.type_name = first.type_name
        self.message = first.message
        self.traceback = first.traceback
        parts = [f"{len(failures)} of {world_size} ranks failed, rank {first.rank} first."]
        parts += [f"--- rank {f.rank}: {f.type_name}\n{f.traceback.rstrip()}" for f in failures]
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.failures, self.world_size)


def run_ranks(
    fn: Callable[..., Result], world_size: int, *args: object, timeout_s: float = 60
) -> list[Result]:
    """Run ``fn(*args)`` on ``world_size`` local processes and return the results in rank order.

    Each rank has a new default group with gloo and one torch thread; ``torch``, ``random``, and
    ``numpy`` where it is loaded, are seeded with 0. Ranks have the caller's environment variables,
    working directory, ``sys.path`` and warning filters. When the call ends, the output of the ranks
    is written to this process' ``sys.stderr``. Do not call it from several threads at once.

    Args:
        fn: a function at the top level of a module. Test modules work, even if pytest imports them
            with ``--import-mode=importlib`` and they import their siblings.
        world_size: the number of ranks, at least 1.
        args: the arguments of ``fn``, the same for every rank. They are pickled.
        timeout_s: a rank that has not returned after so many seconds is killed and counts as
            failed. Once a rank has failed, the others have five seconds (``GRACE_S``) to return.

    Returns:
        The results of ``fn``, one entry a rank. Tensors are returned by value.

    Raises:
        RankError: at least one rank raised, died or hung. The error lists all of them.
        TypeError: ``fn`` or ``args`` cannot be pickled.
        ValueError: ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks needs a world_size of at least 1, got {world_size}")
    try:
        payload, sources = dump((fn, args, list(warnings.filters)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks sends fn and its arguments by pickle, and that failed: {error}. "
            f"Use a function at the top level of a module; got {fn!r}"
        ) from error

    pool = _pools.pop(world_size, None)
    if pool is None or not pool.is_alive():
        if pool is not None:
            pool.kill()
        pool = Pool(world_size)
    try:
        results, failures = pool.call(payload, sources, timeout_s)
        reusable = not failures and pool.end_call()
    except BaseException:  # also an interrupt or a test's timeout: the ranks are mid-call
        pool.kill()
        raise
    if reusable:
        _pools[world_size] = pool
    else:
        pool.kill()
    if failures:
        raise RankError(failures, world_size)
    # Only now, because the pool is kept even if a result cannot be unpickled.
    return [pickle.loads(result) for result in results]


def close_pools() -> None:
    """Kill all idle ranks. Runs at exit. A later ``run_ranks`` starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


# The exit handler of multiprocessing waits for its children, so it must run after this one. It
# does, because it was registered earlier: when pool.py imported multiprocessing.util.
atexit.register(close_pools)
