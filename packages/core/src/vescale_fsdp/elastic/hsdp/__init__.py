"""Replicas of a sharded model that fail alone: the others make their step without them."""
