"""Checkpoints that load on any number of ranks and with any granularity.

This first form writes PyTorch's distributed checkpoint format (DCP), with each rank's flat
ranges as chunks. It is built on the public engine only.
"""

from vescale_fsdp.checkpoint.dcp import SaveHandle, load, save

__all__ = ["SaveHandle", "load", "save"]
