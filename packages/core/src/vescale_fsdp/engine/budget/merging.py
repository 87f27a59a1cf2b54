"""Merges figures of all ranks through the store: the largest, the smallest, and failures."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S, exchange
from vescale_fsdp.errors import PlanError

ResultT = TypeVar("ResultT")


class Figures(NamedTuple):
    """Numbers of one rank, or of all."""

    smallest: list[float]  # merged: the smallest of all ranks
    largest: list[float]


def merge_figures(topic: str, ranks: list[int], own: Callable[[], Figures]) -> Figures:
    """Return the figures of all ranks. Collective. Each rank has equally many.

    Raises:
        PlanError: ``own`` raised one, on this rank or another.
    """
    me, failure = dist.get_rank(), None
    figures = Figures([], [])
    try:
        figures = own()
    except PlanError as error:  # the others wait
        failure = error
    said = {"failed": None if failure is None else [me, str(failure)], "figures": figures}
    merged = json.loads(exchange(topic, json.dumps(said), ranks, _merge, timeout_s=LONG_TIMEOUT_S))
    if merged["failed"] is not None:
        rank, text = merged["failed"]
        raise PlanError(text if rank == me else f"rank {rank}: {text}") from failure
    return Figures(*merged["figures"])


def _merge(payloads: list[str]) -> str:
    said = [json.loads(payload) for payload in payloads]
    failed = next((each["failed"] for each in said if each["failed"] is not None), None)
    merged: list[Any] = []
    if failed is None:
        by_kind = zip(*(each["figures"] for each in said), strict=True)
        for pick, of_ranks in zip((min, max), by_kind, strict=True):
            merged.append([pick(numbers) for numbers in zip(*of_ranks, strict=True)])
    return json.dumps({"failed": failed, "figures": merged})


def result_of(topic: str, ranks: list[int], speaker: int, make: Callable[[], ResultT]) -> ResultT:
    """Return what ``make`` returns on the rank ``speaker``. Collective.

    Raises:
        PlanError: ``make`` raised one there.
    """
    payload = ""
    if dist.get_rank() == speaker:
        try:
            said: tuple[bool, Any] = (True, make())
        except PlanError as error:
            said = (False, str(error))
        payload = base64.b64encode(pickle.dumps(said)).decode()
    answer = exchange(topic, payload, ranks, _first, timeout_s=LONG_TIMEOUT_S)
    is_there, result = pickle.loads(base64.b64decode(answer))  # this job's own ranks wrote it
    if not is_there:
        raise PlanError(result)
    made: ResultT = result
    return made


def _first(payloads: Sequence[str]) -> str:
    return next((payload for payload in payloads if payload), "")
