"""The settings of a step whose costs are computed: ranks, dtypes, network, 8-bit codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner import TensorSpec
from vescale_fsdp.program import ZERO_TABLE, Row
from vescale_fsdp_tune.costs.machine import Backend
from vescale_fsdp_tune.costs.model import BF16, FP32, Dtype, Group, Tensor

if TYPE_CHECKING:
    from vescale_fsdp.spi import Coding

Activations = Literal["keep", "recompute", "offload", "recompute+offload"]
OptimizerName = Literal[
    "adamw", "adamw_fused", "adamw8bit", "muon", "sgd", "sgd_fused", "none"
]  # fused: torch's with ``fused=True``
NUM_STATES: dict[OptimizerName, int] = {  # of an element, at most
    "adamw": 2,
    "adamw_fused": 2,
    "adamw8bit": 2,
    "muon": 2,
    "sgd": 1,
    "sgd_fused": 1,
    "none": 0,
}


@dataclass(frozen=True)
class Code:
    """The dtype of the codes, and the block of elements that share a scale."""

    dtype: Literal["int8", "e4m3"]
    block: int | tuple[int, int]

    def __str__(self) -> str:
        size = f"{self.block[0]}x{self.block[1]}" if isinstance(self.block, tuple) else self.block
        return f"{self.dtype}:{size}"

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has at least as many elements as a block."""
        numel = math.prod(self.block) if isinstance(self.block, tuple) else self.block
        return tensor.numel >= numel


@dataclass(frozen=True)
class Codes:
    """The 8-bit codes of weights (gather) and gradients (reduce). None: not encoded."""

    gather: Code | None = None
    reduce: Code | None = None

    def of(self, tensor: Tensor, group: Group) -> tuple[Coding | None, Coding | None]:
        """Return the coding of one tensor in all-gather and in reduce-scatter, as in the engine."""
        if (self.gather is None and self.reduce is None) or not group.dtype.floating:
            return None, None
        from vescale_fsdp.spi import Blocks, Coding  # loads torch

        def coding(code: Code | None, is_chosen: bool) -> Coding | None:
            if code is None or not is_chosen or not code.fits(tensor):
                return None
            return Coding(code.dtype, Blocks(code.block, tensor.shape))

        return coding(self.gather, tensor.is_hidden), coding(self.reduce, tensor.is_matrix)

    def spec(self, tensor: Tensor, group: Group, asked: int | None) -> TensorSpec:
        """Return a tensor for the planner. Its block does not split blocks of its codes.

        Args:
            asked: the block that the user wants, in elements. None: not said.

        Raises:
            PlanError: ``asked`` allows splits within blocks of the codes.
        """
        gather, reduce = self.of(tensor, group)
        if gather is None and reduce is None:
            return TensorSpec(tensor.name, tensor.shape, 1 if asked is None else asked)
        from vescale_fsdp.spi import checked_block

        try:
            block = checked_block(tensor.name, tensor.shape, asked, gather, reduce)
        except ValueError as error:
            raise PlanError(
                f"the granularity allows splits between any two blocks of {asked} elements of "
                f"{tensor.name!r}, of shape {list(tensor.shape)}, but it is sent as "
                f"{gather or reduce}; leave it out for this tensor to use the blocks of its codes"
            ) from error
        return TensorSpec(tensor.name, tensor.shape, block)


AS_THEY_ARE = Codes()


@dataclass(frozen=True)
class Settings:
    """The settings of one step of one model."""

    num_ranks: int
    num_replicas: int = 1  # HSDP: num_ranks / num_replicas ranks shard one copy of the model
    compute_dtype: Dtype = BF16  # of unsharded parameters and of gradients
    reduce_dtype: Dtype = FP32  # in which gradients are summed
    optimizer: OptimizerName = "adamw"
    reshard: bool | None = None  # reshard_after_forward of all units; None: all but the root
    backend: Backend = "nccl"
    bandwidth_bytes_per_s: float = 50e9
    order: str = "auto"
    in_flight: int = 2
    codes: Codes = AS_THEY_ARE
    sharding: str | None = None  # None: "zero3", or "hsdp" with replicas
    micro_batches: int = 1
    offload: bool = False  # shards, gradients and optimizer states are in the host's memory

    @property
    def row(self) -> Row:
        """The row of the table of ZeRO's stages."""
        return ZERO_TABLE[self.sharding or ("hsdp" if self.num_replicas > 1 else "zero3")]

    @property
    def num_summed(self) -> int:
        """Number of ranks that have the same shard, and sum its gradients."""
        return self.num_replicas if self.row.cuts_states else self.num_ranks

    @property
    def num_shards(self) -> int:
        """Number of ranks of an all-gather."""
        return self.num_ranks // self.num_summed

    @property
    def num_outer(self) -> int:
        """Number of replicas that optimizer states are sharded over too."""
        return self.num_replicas if self.row.cuts_states_outside else 1

    @property
    def num_resting_shards(self) -> int:
        """Number of ranks that one copy of the model is sharded over between steps."""
        return self.num_shards * self.num_outer
