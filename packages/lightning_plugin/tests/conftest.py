"""Ranks are forked from a process that has Lightning, too: it takes a second to load."""

from __future__ import annotations

from vescale_fsdp.testing import pool

pool.PRELOADED += ["lightning.pytorch", "vescale_fsdp_lightning.strategy"]
