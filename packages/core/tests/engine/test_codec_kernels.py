"""Training whose messages Triton's kernels write and read, in its interpreter."""

from __future__ import annotations

import pytest
import torch

from vescale_fsdp import QuantizedGather, QuantizedReduce
from vescale_fsdp.dbuffer import codec_launches as launching
from vescale_fsdp.testing import run_ranks

from ..dbuffer.interpreter import interpreted
from .test_quantized_reduce import train_both

pytest.importorskip("triton", reason="the kernels are Triton's")


def check_training() -> None:
    launches = []
    encode, decode = launching.encode, launching.decode
    launching.encode = lambda *args, **kwargs: launches.append(encode(*args, **kwargs))
    launching.decode = lambda *args, **kwargs: launches.append(decode(*args, **kwargs))
    try:
        with interpreted():
            reduce = QuantizedReduce((8, 8), error_feedback=True)
            train_both(reduce, torch.bfloat16, QuantizedGather("e4m3", (8, 8)))
    finally:
        launching.encode, launching.decode = encode, decode
    assert launches


@pytest.mark.nightly  # 20 s in Triton's interpreter; the kernels' own tests run at each change
def test_training_is_that_of_one_process_that_rounds() -> None:
    run_ranks(check_training, 2)
