"""Reads and sets the states of a rank's random number generators: Python, NumPy, torch, CUDA."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from vescale_fsdp import devices


def capture() -> dict[str, Any]:
    """Return the states, in types that `values.encode` accepts. CUDA: of the current device."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (str(name), keys.tolist(), *map(_plain, rest))
    cuda = devices.generator_state()
    if cuda is not None:
        found["cuda"] = cuda
    return found


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)


def restorer(state: dict[str, Any]) -> Callable[[], None]:
    """Return a function that sets these states. They are first set on temporary generators.

    So a damaged state raises here, and changes nothing. Generators that this process does not have
    (NumPy is not imported, no CUDA) are skipped.
    """
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])
    numpy = sys.modules.get("numpy") if "numpy" in state else None
    if numpy is not None:
        numpy.random.RandomState().set_state(state["numpy"])

    def apply() -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if numpy is not None:
            numpy.random.set_state(state["numpy"])
        if "cuda" in state:
            devices.set_generator_state(state["cuda"])

    return apply


def restore(state: dict[str, Any]) -> None:
    """Set these states."""
    restorer(state)()


def seed_for(text: str) -> Callable[[], None]:
    """Return a function that seeds the generators from a text. Equal texts give equal seeds."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def apply() -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    return apply
