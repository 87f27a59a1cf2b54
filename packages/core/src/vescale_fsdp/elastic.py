"""Moved to a distribution of its own: an import raises, with what to write instead."""

from vescale_fsdp import has_moved

raise ImportError(has_moved("elastic"))
