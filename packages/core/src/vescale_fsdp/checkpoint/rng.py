"""The states of the random number generators of a rank: Python's, NumPy's, torch's, CUDA's."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from vescale_fsdp import devices


def capture() -> dict[str, Any]:
    """The states now, as `values.encode` takes them. CUDA's is that of the current device."""
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
    """What gives the generators these states. The states are tried on other generators first.

    Generators that this process does not have (NumPy is not imported, no CUDA) are passed over.
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
    """Give the generators these states."""
    restorer(state)()


def seed_for(text: str) -> Callable[[], None]:
    """What seeds the generators with a text: the same numbers for the same text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def apply() -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    return apply
