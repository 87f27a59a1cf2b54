"""Placeholder for the adapter to Accelerate and ``transformers.Trainer``: it does nothing yet.

``VeScaleAccelerator`` and ``VeScaleFSDPPlugin`` will live here. Asking for either raises
``NotImplementedError`` today; the message says what to use meanwhile. Importing this package is
harmless: it imports neither torch nor Accelerate.
"""

from __future__ import annotations

from typing import NoReturn

_PLANNED = ("VeScaleAccelerator", "VeScaleFSDPPlugin")


def __getattr__(name: str) -> NoReturn:
    """Say of a planned name that it is not there yet, and of any other that it does not exist.

    Raises:
        NotImplementedError: ``name`` is one of the planned names.
        AttributeError: ``name`` is anything else.
    """
    if name in _PLANNED:
        raise NotImplementedError(
            f"vescale_fsdp_accelerate.{name} is not there yet: this package is a placeholder. "
            "Until it is, call vescale_fsdp.fully_shard in a loop of your own, or use Lightning "
            'with Trainer(strategy="vescale_fsdp") from the package vescale-fsdp-lightning.'
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
