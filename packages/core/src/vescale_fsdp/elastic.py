"""Moved to a distribution of its own: an import raises, with what to write instead."""

from vescale_fsdp import ELASTIC_HAS_MOVED

raise ImportError(ELASTIC_HAS_MOVED)
