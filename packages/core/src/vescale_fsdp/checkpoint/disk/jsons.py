"""JSON as checkpoints have it: written without spaces, read strictly.

What another reader would let pass is refused: names that come twice, NaN, a nesting that exhausts
the stack. A file of which one part was overwritten is then never half believed.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["dump", "load"]


def dump(value: Any) -> str:
    """The text of a value that JSON can hold. ASCII only, on one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def load(text: str | bytes) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is not JSON, or a name comes twice in one object.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} comes twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
