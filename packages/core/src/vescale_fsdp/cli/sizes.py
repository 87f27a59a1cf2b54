"""Sizes of the units and groups of a model on one rank, for an account of its memory."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fsdp.cli.dtypes import Dtype


@dataclass(frozen=True)
class GroupMemory:
    """Sizes and dtypes of one group, per rank."""

    shard_elements: int
    num_shards: int
    tensors: tuple[int, ...]  # elements of each, in the order of their definition
    shard_dtype: Dtype
    compute_dtype: Dtype
    reduce_dtype: Dtype
    trainable: bool
    gather_message: int | None = None  # bytes of codes that a rank sends; None: its part as it is
    reduce_message: int | None = None  # and to each rank, of its gradients

    @property
    def gathered_message(self) -> int:
        """Bytes that a rank brings to a gather."""
        if self.gather_message is not None:
            return self.gather_message
        return self.shard_elements * self.compute_dtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of its tensors, without gaps."""
        return sum(self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.shard_elements * self.num_shards * self.compute_dtype.itemsize

    @property
    def made_bytes(self) -> int:
        """Bytes of the gradients that autograd makes."""
        return self.elements * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard; of its gradient too."""
        return self.shard_elements * self.shard_dtype.itemsize


@dataclass(frozen=True)
class UnitMemory:
    """One unit of a model, in a place of the order in which forward runs them."""

    title: str
    groups: tuple[GroupMemory, ...]
    is_root: bool
    keeps: bool  # its gathered parameters stay from forward to backward

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters wants a gradient."""
        return any(group.trainable for group in self.groups)
