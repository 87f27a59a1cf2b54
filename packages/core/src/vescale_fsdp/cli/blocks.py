"""``--granularity``: which blocks of which tensors must not be cut.

A rule is ``SPEC`` (for matrices: tensors of two or more dimensions) or ``PATTERN=SPEC`` (for
tensors whose name in their unit matches the shell pattern). The last rule that fits a
tensor holds; where none does, it may be cut anywhere.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Tensor

_HELP = "elements:256, rows:128, tile:32x32 or whole, after an optional PATTERN="
_SPEC = re.compile(r"elements:(\d+)|rows:(\d+)|tile:(\d+)x(\d+)|whole")

_Block = Callable[[Sequence[int]], int]  # from the shape to the block, in elements


class BlockRules:
    """The rules of one command line.

    Raises:
        InputError: a rule is none.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self._rules: list[tuple[str | None, _Block]] = []  # without a pattern: for matrices
        for rule in rules:
            pattern, equals, spec = rule.rpartition("=")
            if equals and not pattern:
                raise InputError(f"--granularity {rule!r} has no pattern before '='")
            self._rules.append((pattern or None, _block(spec, rule)))
        self._hits = [False] * len(rules)
        self._texts = list(rules)

    def block(self, tensor: Tensor) -> int | None:
        """The block of a tensor, in elements; None if no rule fits it."""
        found = None
        for index, (pattern, block) in enumerate(self._rules):
            if pattern is None:
                fits = len(tensor.shape) >= 2
            else:
                fits = fnmatch.fnmatchcase(tensor.name, pattern)
            if fits:
                self._hits[index] = True
                found = block(tensor.shape)
        return found

    def unmatched(self) -> list[str]:
        """The rules that fitted no tensor so far: most likely a pattern with a mistake."""
        return [text for text, hit in zip(self._texts, self._hits, strict=True) if not hit]


def _block(spec: str, rule: str) -> _Block:
    found = _SPEC.fullmatch(spec)
    if not found:
        raise InputError(f"--granularity {rule!r}: {spec!r} is none of {_HELP}")
    from vescale_fsdp import Granularity  # the engine's own rule; it loads torch

    elements, rows, tile_rows, tile_columns = (int(n) if n else None for n in found.groups())
    try:
        if elements is not None:
            return Granularity.elements(elements).block
        if rows is not None:
            return Granularity.rows(rows).block
        if tile_rows is not None and tile_columns is not None:
            return Granularity.tile(tile_rows, tile_columns).block
    except ValueError as error:
        raise InputError(f"--granularity {rule!r}: {error}") from error
    return Granularity.whole().block
