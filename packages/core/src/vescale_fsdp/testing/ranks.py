"""``run_ranks``: call a function on every rank of a local gloo group and collect what it returns.

The ranks come from a pool per world size that lives as long as this process, so that a call
costs a process group and not the start of processes. After any failure the pool is thrown away:
ranks that failed half-way may hold collectives that nobody will ever finish.
"""

from __future__ import annotations

import atexit
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from vescale_fsdp.testing.pool import Pool, RankFailure
from vescale_fsdp.testing.worker import dump

Result = TypeVar("Result")

_pools: dict[int, Pool] = {}


class RankError(Exception):
    """One or more ranks raised, died or did not finish in time.

    The first failure to arrive is most likely the cause; the others often follow from it.

    Attributes:
        failures: one ``RankFailure`` per failing rank, in the order in which they arrived.
        rank: rank of the first failure.
        type_name: name of the exception's type there, as in ``"ValueError"``; ``"RankDied"`` or
            ``"RankHung"`` if no exception arrived.
        message: the exception's text there.
        traceback: the traceback there, or the known facts about a rank that died or hung.
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

    On each rank there is a fresh gloo default group, one torch thread, and ``torch`` and
    ``random`` seeded with 0. Ranks have the caller's environment variables, working directory,
    ``sys.path`` and warning filters. The output of the ranks arrives on this
    process' ``sys.stderr`` when the call ends. Not safe to call from several threads at once.

    Args:
        fn: a function at the top level of a module. Test modules work, also if pytest
            imports them with ``--import-mode=importlib`` and they import their siblings.
        world_size: number of ranks, at least 1.
        args: the same for every rank; must pickle.
        timeout_s: a rank that has not returned by then is killed and counts as failed. Once a
            rank has failed, the others have five seconds (``GRACE_S``) to return.

    Returns:
        The results of ``fn``, one entry a rank. Tensors are returned by value.

    Raises:
        RankError: at least one rank raised, died or hung; it lists every one that did.
        TypeError: ``fn`` or ``args`` do not pickle.
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
    # Loaded only now: a result that fails to load leaves a sound pool behind.
    return [pickle.loads(result) for result in results]


def close_pools() -> None:
    """End all idle ranks. Runs at exit; the next ``run_ranks`` starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


# multiprocessing's own exit handler waits for its children. It was registered before this one,
# when pool.py imported multiprocessing.util, and so runs after it.
atexit.register(close_pools)
