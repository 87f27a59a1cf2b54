"""What a user of the command line can do wrong."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(Exception):
    """Bad input. ``main`` prints the message as one line on stderr and ends with exit code 2."""
