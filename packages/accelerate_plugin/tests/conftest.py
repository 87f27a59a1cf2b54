"""Ranks are forked from a process that has Accelerate and most of transformers, too."""

from __future__ import annotations

from vescale_fsdp.testing import pool

pool.PRELOADED += ["transformers.modeling_utils", "vescale_fsdp_accelerate.accelerator"]
