"""How much may be under way at a time: one row for a model, made when it first runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What the engine may have under way beside the unit that runs.

    Attributes:
        unshards: all-gathers ahead, less a reduction under way where they alternate.
        reductions: under way while gradients of another group appear; 0: each is waited for.
        reductions_at_end: under way while another is copied when the backward has ended.
        stays: units that a forward leaves unsharded, as its backward unshards them first.
        alternates: whether the reduction before and the next all-gather share the room of one.
        small_bytes: neighbours of at most so much for each rank travel in one message (`bundles`).
    """

    unshards: int
    reductions: int
    reductions_at_end: int
    stays: int
    alternates: bool
    small_bytes: float = 0


def policy_of(
    in_flight: int, told: Iterable[int | None], *, has_streams: bool, small_bytes: float = 0
) -> Policy:
    """The row for what a user has set.

    Args:
        in_flight: as of ``fully_shard``.
        told: for each unit how many reductions may be under way; None: it was not told.
        has_streams: of the device. Without them the ranks' processes wait for what is under way,
            so that all-gathers and reductions had better alternate.
        small_bytes: as of `Policy`, where there are no streams.
    """
    most = max((each for each in told if each is not None), default=None)
    reductions = min(in_flight - 1, 1) if most is None else most
    return Policy(
        unshards=in_flight - 1,
        reductions=reductions,
        # What a user says holds to the end.
        reductions_at_end=reductions if most is None else max(reductions - 1, 0),
        stays=max(in_flight - 2, 0),
        alternates=most is None and not has_streams,
        small_bytes=0 if has_streams else small_bytes,
    )
