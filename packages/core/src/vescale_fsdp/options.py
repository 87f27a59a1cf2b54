"""The options of adapters: what each accepts, and the argument of the engine that it becomes.

Words and mappings are the same in a yaml, on a command line and in Python::

    granularity: rows:32                          Granularity.rows(32)
    gather_codec: int8                            QuantizedGather("int8")
    gather_codec: {dtype: e4m3, block: [32, 32]}  QuantizedGather("e4m3", block=(32, 32))
    reduce_codec: {block: 512}                    QuantizedReduce(block=512)

An adapter has one dataclass, whose fields say by `option` what they accept::

    @dataclass(kw_only=True)
    class Options:
        granularity: Any = option(GRANULARITY, None, "rows:32 or whole")
        replicas: int = option(COUNT, 1, "an int of at least 1")

`check` raises in the adapter's own words before a process is started, and `arguments` makes what
``fully_shard`` takes. Words are checked without torch, so that a launcher can do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

from vescale_fsdp.errors import companion

__all__ = [
    "ACTIVATIONS",
    "BUDGET",
    "COUNT",
    "FLAG",
    "GATHER",
    "GRANULARITY",
    "REDUCE",
    "Kind",
    "arguments",
    "check",
    "check_budget",
    "one_of",
    "only",
    "option",
]


_NO_WORD = r"(?!)"  # it matches nothing, also not the empty word


@dataclass(frozen=True)
class Kind:
    """What an option accepts.

    Attributes:
        words: a regular expression of the accepted words.
        parse: makes the argument from a word or another value, or raises ValueError, with a reason
            if there is more to say than what is accepted. None: only words are accepted.
    """

    words: str = _NO_WORD
    parse: Callable[[Any], Any] | None = None


def option(kind: Kind, default: Any, accepted: str, help: str = "") -> Any:
    """A field of a dataclass of options.

    Args:
        accepted: the accepted values, for the error.
        help: what it does, for a yaml with comments.
    """
    metadata = {"kind": kind, "accepted": accepted, "help": help}
    return field(default=default, kw_only=True, metadata=metadata)


def check(options: Any, text: str) -> None:
    """Raise if an option has a value that is not accepted.

    Args:
        text: the error, with ``{name}``, ``{value}``, ``{reason}`` and ``{accepted}``.

    Raises:
        ValueError: the text.
    """
    for each in fields(options):
        value, kind = getattr(options, each.name), each.metadata.get("kind")
        if kind is None or (value is None and each.default is None):
            continue
        if isinstance(value, str) and re.fullmatch(kind.words, value):
            continue
        reason = ""
        try:
            if kind.parse is not None:
                kind.parse(value)
                continue
        except ValueError as error:
            reason = f" ({error})" if str(error) else ""
        accepted = each.metadata["accepted"]
        raise ValueError(text.format(name=each.name, value=value, reason=reason, accepted=accepted))


def check_budget(options: Any, chosen: Iterable[str], text: str) -> None:
    """Raise if there is a budget, and an option that it chooses has another value than its default.

    Args:
        chosen: the names of these options.
        text: the error, with ``{budget}``, ``{name}`` and ``{value}``.

    Raises:
        ValueError: the text.
    """
    if options.budget is None:
        return
    defaults = {each.name: each.default for each in fields(options)}
    for name in chosen:
        value = getattr(options, name)
        if value != defaults[name]:
            raise ValueError(text.format(budget=options.budget, name=name, value=value))


def arguments(options: Any, *names: str) -> dict[str, Any]:
    """Make the arguments of ``fully_shard`` of these names, from options that were checked."""
    made: dict[str, Any] = {}
    for each in fields(options):
        if each.name in names:
            value, parse = getattr(options, each.name), each.metadata["kind"].parse
            made[each.name] = value if value is None or parse is None else parse(value)
    return made


def one_of(*words: str) -> Kind:
    """One of these words."""
    return Kind("|".join(map(re.escape, words)))


def only(accepts: Callable[[Any], bool], words: str = _NO_WORD) -> Kind:
    """A value that the function accepts, or one of the words of a regular expression."""

    def parse(value: Any) -> Any:
        if not (accepts(value) or (isinstance(value, str) and re.fullmatch(words, value))):
            raise ValueError
        return value

    return Kind(words, parse)


def _granularity_of(value: Any) -> Any:
    from vescale_fsdp.engine import Granularity

    if isinstance(value, str) and re.fullmatch(_GRANULARITIES, value):
        kind, _, sizes = value.partition(":")
        return getattr(Granularity, kind)(*map(int, sizes.split("x") if sizes else ()))
    if isinstance(value, Granularity) or callable(value):
        return value
    raise ValueError


def _gather_of(value: Any) -> Any:
    from vescale_fsdp.engine import QuantizedGather

    return _codec(QuantizedGather, value, ("dtype", "block"))


def _reduce_of(value: Any) -> Any:
    from vescale_fsdp.engine import QuantizedReduce

    if isinstance(value, QuantizedReduce):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"dtype": value}
    if given.pop("dtype", "int8") != "int8":
        raise ValueError("dtype must be 'int8'")  # the only one, so that the codec has none
    return _codec(QuantizedReduce, given, ("block", "error_feedback"))


def _codec(kind: Any, value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, kind):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"dtype": value}
    if given.keys() - set(known) or not isinstance(given.get("error_feedback", False), bool):
        raise ValueError
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})


def _is_budget(value: Any) -> bool:
    companion("vescale_fsdp_tune", f"budget={value!r}", "vescale-fsdp[tune]")
    return bool(import_module("vescale_fsdp_tune.costs").is_budget(value))


def _is_policy(value: Any) -> bool:
    return callable(value) or (isinstance(value, list) and all(map(callable, value)))


_GRANULARITIES = r"elements:[1-9]\d*|rows:[1-9]\d*|tile:[1-9]\d*x[1-9]\d*|whole"
FLAG = only(lambda value: isinstance(value, bool))
COUNT = only(lambda value: type(value) is int and value >= 1)
GRANULARITY = Kind(_GRANULARITIES, _granularity_of)
GATHER = Kind("int8|e4m3", _gather_of)
REDUCE = Kind("int8", _reduce_of)
BUDGET = only(_is_budget)
ACTIVATIONS = only(_is_policy, r"recompute|offload|recompute\+offload")
