"""Triton's interpreter for our kernels, for as long as a test wants it.

Triton decides when a function is decorated, and torch may have imported it long before. So our
kernels are decorated again, and so is what they use of Triton's own. Afterwards nothing can be
compiled in such a process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

NAMES = ("TRITON_INTERPRET", "VESCALE_FSDP_CODEC")


@contextmanager
def interpreted() -> Iterator[None]:
    """A context in which codecs that are first used take the kernels, on a CPU."""
    import triton
    import triton.language as tl

    from vescale_fsdp.dbuffer import codec_kernels

    with mock.patch.dict(os.environ, dict(zip(NAMES, ("1", "triton"), strict=True))):
        importlib.reload(codec_kernels)
        largest = tl.max if hasattr(tl.max, "rewrite") else triton.jit(tl.max.fn)
        # It computes with NumPy, which warns of infinity.
        with mock.patch.object(tl, "max", largest), np.errstate(all="ignore"):
            yield
    importlib.reload(codec_kernels)


@contextmanager
def torchs_operators() -> Iterator[None]:
    """A context in which codecs that are first used do not take the kernels."""
    with mock.patch.dict(os.environ, {"VESCALE_FSDP_CODEC": "torch"}):
        yield


@contextmanager
def compiled() -> Iterator[None]:
    """A context in which codecs that are first used take the kernels, on a GPU."""
    with mock.patch.dict(os.environ, {"VESCALE_FSDP_CODEC": "triton"}):
        yield
