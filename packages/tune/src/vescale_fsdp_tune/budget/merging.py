"""Merges figures of all ranks through the store: the largest, the smallest, and failures."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import limit_s, over

ResultT = TypeVar("ResultT")

_MOST_LETTERS = 500


class Figures(NamedTuple):
    """Numbers of one rank, or of all."""

    smallest: list[float]  # merged: the smallest of all ranks
    largest: list[float]


def merge_figures(topic: str, ranks: list[int], own: Callable[[], Figures]) -> Figures:
    """Return the figures of all ranks. Collective. Each rank has equally many.

    Raises:
        PlanError: ``own`` raised an exception on another rank.
        Exception: what ``own`` raised on this rank.
    """
    me, failed = dist.get_rank(), None
    figures = Figures([], [])
    failure: Exception | None = None
    try:
        figures = own()
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait
        failure, failed = error, [me, words_of(error)]
    said = {"failed": failed, "figures": figures}
    merged = over(ranks).exchange(topic, said, _merge, timeout_s=limit_s(may_be_late=True))
    if failure is not None:
        raise failure
    if merged["failed"] is not None:
        rank, text = merged["failed"]
        raise PlanError(f"rank {rank}: {text}")
    return Figures(*merged["figures"])


def words_of(error: Exception) -> str:
    """Return type and message of an exception in one line, not too long."""
    message = " ".join(str(error).split())
    if len(message) > _MOST_LETTERS:
        message = f"{message[:_MOST_LETTERS]} ..."
    return message if isinstance(error, PlanError) else f"{type(error).__name__}: {message}"


def _merge(said: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((each["failed"] for each in said if each["failed"] is not None), None)
    merged: list[Any] = []
    if failed is None:
        by_kind = zip(*(each["figures"] for each in said), strict=True)
        for pick, of_ranks in zip((min, max), by_kind, strict=True):
            merged.append([pick(numbers) for numbers in zip(*of_ranks, strict=True)])
    return {"failed": failed, "figures": merged}


def result_of(topic: str, ranks: list[int], speaker: int, make: Callable[[], ResultT]) -> ResultT:
    """Return what ``make`` returns on the rank ``speaker``. Collective.

    Raises:
        PlanError: ``make`` raised an exception there.
    """
    payload = ""
    if dist.get_rank() == speaker:
        try:
            said: tuple[bool, Any] = (True, make())
        except Exception as error:  # noqa: BLE001  # whatever it is, the others wait
            said = (False, words_of(error))
        payload = base64.b64encode(pickle.dumps(said)).decode()
    answer = over(ranks).exchange(topic, payload, _first, timeout_s=limit_s(may_be_late=True))
    is_there, result = pickle.loads(base64.b64decode(answer))  # this job's own ranks wrote it
    if not is_there:
        raise PlanError(result)
    made: ResultT = result
    return made


def _first(payloads: Sequence[str]) -> str:
    return next((payload for payload in payloads if payload), "")
