"""JSON as checkpoints have it: written without spaces, read strictly.

What another reader would let pass is refused: names that come twice, NaN, a nesting that exhausts
the stack. A file of which one part was overwritten is then never half believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]  # what JSONDecoder uses
from typing import Any, TypeVar

T = TypeVar("T")
_OPEN, _CLOSE, _COLON, _COMMA = (
    re.compile(rf"[ \t\n\r]*{sign}[ \t\n\r]*") for sign in [r"\{", r"\}", r":", r","]
)


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


class Walk:
    """Goes through a text from its beginning, so that large objects are never there as a whole.

    As strict as `load`. All methods raise ValueError.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse)

    def value(self) -> Any:
        """The value that comes next."""
        try:
            value, self._at = self._decode.raw_decode(self._text, self._at)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return value

    def object(self, read: Callable[[str], T]) -> dict[str, T]:
        """The object that comes next. ``read`` gets each name and reads its value from here."""
        found: dict[str, T] = {}
        if not self._pass(_OPEN):
            raise ValueError(f"expected an object at character {self._at}")
        if self._pass(_CLOSE):
            return found
        while True:
            if not self._text.startswith('"', self._at):
                raise ValueError(f"expected a name at character {self._at}")
            name, self._at = scanstring(self._text, self._at + 1, True)
            if not self._pass(_COLON):
                raise ValueError(f"expected ':' at character {self._at}")
            if name in found:
                raise ValueError(f"the name {name!r} comes twice")
            found[name] = read(name)
            if not self._pass(_COMMA):
                break
        if not self._pass(_CLOSE):
            raise ValueError(f"expected ',' or '}}' at character {self._at}")
        return found

    def end(self) -> None:
        """Raise unless this is the end of the text."""
        if self._at != len(self._text):
            raise ValueError(f"expected its end at character {self._at}")

    def _pass(self, sign: re.Pattern[str]) -> bool:
        match = sign.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match is not None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} comes twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
