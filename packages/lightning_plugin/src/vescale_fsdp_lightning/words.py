"""Parses strings and mappings of yaml and the command line for which Python passes objects.

::

    granularity: rows:32                          Granularity.rows(32)
    gather_codec: int8                            QuantizedGather("int8")
    gather_codec: {dtype: e4m3, block: [32, 32]}  QuantizedGather("e4m3", block=(32, 32))
    reduce_codec: int8                            QuantizedReduce()
    reduce_codec: {block: 512}                    QuantizedReduce(block=512)
    timeout: 60                                   timedelta(seconds=60)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from vescale_fsdp import Granularity, QuantizedGather, QuantizedReduce

__all__ = ["GRANULARITIES", "gather_of", "granularity_of", "reduce_of", "timeout_of"]

GRANULARITIES = (
    "a Granularity, a policy (name, parameter) -> Granularity | None, elements:256, rows:128, "
    "tile:32x32 or whole"
)
_GATHERS = (
    'a QuantizedGather, "int8", "e4m3", a mapping of dtype and block such as {"dtype": "int8", '
    '"block": [32, 32]}, or None'
)
_REDUCES = (
    'a QuantizedReduce, "int8", a mapping of block and error_feedback such as {"block": 256, '
    '"error_feedback": True}, or None'
)
_SPEC = re.compile(r"elements:(\d+)|rows:(\d+)|tile:(\d+)x(\d+)|whole")

OptionT = TypeVar("OptionT", QuantizedGather, QuantizedReduce)


def granularity_of(text: str) -> Granularity:
    """Parse a granularity such as ``rows:32``.

    Raises:
        ValueError: it is not a granularity.
    """
    found = _SPEC.fullmatch(text)
    if not found:
        raise ValueError(
            f"VeScaleFSDPStrategy(granularity={text!r}) does not work; accepted are {GRANULARITIES}"
        )
    elements, rows, tile_rows, tile_columns = (int(each) if each else 0 for each in found.groups())
    if text == "whole":
        return Granularity.whole()
    if tile_rows or tile_columns:
        return Granularity.tile(tile_rows, tile_columns)
    return Granularity.rows(rows) if rows else Granularity.elements(elements)


def gather_of(value: Any) -> QuantizedGather | None:
    """Parse a ``gather_codec``: ``"int8"``, ``{"dtype": "e4m3", "block": [32, 32]}``, or an object.

    Raises:
        ValueError: it is none of these.
    """
    options = {"dtype": value} if isinstance(value, str) else value
    return _made(QuantizedGather, "gather_codec", value, options, ("dtype", "block"), _GATHERS)


def reduce_of(value: Any) -> QuantizedReduce | None:
    """Parse a ``reduce_codec``: ``"int8"``, ``{"block": 256}``, or an object.

    Raises:
        ValueError: it is none of these.
    """
    options = {} if value == "int8" else value  # the only dtype
    known = ("block", "error_feedback")
    return _made(QuantizedReduce, "reduce_codec", value, options, known, _REDUCES)


def timeout_of(value: Any) -> timedelta | None:
    """Parse a timeout. A number counts seconds.

    Raises:
        ValueError: it is not a time, or not positive.
    """
    if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return timedelta(seconds=value)
    raise ValueError(
        f"VeScaleFSDPStrategy(timeout={value!r}) does not work; accepted are a number of seconds, "
        "a timedelta (in yaml 0:30:00), both above 0, or None for the process group's own"
    )


def _made(
    kind: type[OptionT], name: str, value: Any, options: Any, known: tuple[str, ...], accepted: str
) -> OptionT | None:
    if value is None or isinstance(value, kind):
        return value
    reason = ""
    if isinstance(options, Mapping) and not options.keys() - set(known):
        given: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in options.items()
        }
        if isinstance(given.get("error_feedback", False), bool):
            try:
                return kind(**given)
            except ValueError as error:
                reason = f" ({error})"
    raise ValueError(
        f"VeScaleFSDPStrategy({name}={value!r}) does not work{reason}; accepted are {accepted}"
    )
