"""What torch 2.15 has added to FSDP2 and we lack is refused by name, on any version of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.engine.arguments import check_engine_arguments
from vescale_fsdp.testing import run_ranks


def test_dtypes_by_parameter_are_refused() -> None:
    policy = MixedPrecisionPolicy()
    object.__setattr__(policy, "param_dtype_override_fn", lambda parameter: torch.float32)
    with pytest.raises(NotImplementedError, match="call fully_shard with another mp_policy"):
        check_engine_arguments(policy, None, "auto", 2, False)


def calls() -> list[str]:
    model = fully_shard(nn.Linear(4, 4))
    model.set_keep_unsharded_storage(False)
    model.set_manual_backward_finalization(False)
    said = []
    for call in (
        lambda: model.set_keep_unsharded_storage(True),
        lambda: model.set_manual_backward_finalization(True),
        lambda: model.finalize_backward(async_op=True),
    ):
        with pytest.raises(NotImplementedError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_its_methods_are_refused() -> None:
    keep, manual, finalize = run_ranks(calls, 1)[0]
    assert "set_reshard_after_forward(False)" in keep
    assert "torch.distributed.pipelining of torch 2.15" in manual
    assert finalize == manual
