"""Checkpoints that real DeepSpeed runs have saved. Needs deepspeed (tox: deepspeed)."""
