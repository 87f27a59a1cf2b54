"""Published hardware, for plans without a machine to measure. No torch.

======  ========  ==========  =============  ==========  ==============  ==============
name    memory    its rate    dense bf16     GPUs/node   NVLink, 1 way   network, 1 way
======  ========  ==========  =============  ==========  ==============  ==============
h100    80 GB     3.35 TB/s   989 TFLOPS     8           450 GB/s        50 GB/s
h200    141 GB    4.8 TB/s    989 TFLOPS     8           450 GB/s        50 GB/s
b200    180 GB    8 TB/s      2,250 TFLOPS   8           900 GB/s        50 GB/s
h800    80 GB     3.35 TB/s   979 TFLOPS     8           200 GB/s        50 GB/s
======  ========  ==========  =============  ==========  ==============  ==============

Each has its sources (`Hardware.sources`). Data sheets give NVLink in both directions together, and
tensor operations with sparsity, which are twice these figures. GB is 1e9 bytes.

Nothing reaches published rates. `Hardware.machine` multiplies them by shares:

* `NETWORK_SHARE` and `MEMORY_SHARE`: Table 1 of veScale-FSDP (arXiv 2602.22437) has collectives and
  copies of a GPT-OSS-120B layer under FSDP2 on 64 H800: an all-gather of 6.3 GB to each rank in
  43.7 ms, 0.72 of NVLink; a reduce-scatter of 12.7 GB in 94.2 ms, 0.67; a copy that reads 6.4 GB
  and writes as much in 5.2 ms, 0.74 of the memory's rate.
* `COMPUTE_SHARE` is an assumption. torchtitan's and others' reports of large dense models on H100
  are between 0.4 and 0.6.

Latencies are those that NCCL's own cost model has for rings with its Simple protocol
(src/graph/tuning.cc, NCCL 2.2x): 8.4 us for a collective, 3.4 us for a hop over NVLink, 14 us for
one over the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vescale_fsdp_tune.costs.machine import Link, Machine

NETWORK_SHARE = 0.7
MEMORY_SHARE = 0.74
COMPUTE_SHARE = 0.5
_COLLECTIVE_S, _NVLINK_HOP_S, _NETWORK_HOP_S = 8.4e-6, 3.4e-6, 14e-6
# cuBLAS, for forward's thread and for backward's: what torch asks for on Hopper and Blackwell, and
# what an H200 took (docs/design/cuda.md).
_WORKSPACE_BYTES = 2 * (32 << 20)
# A fused AdamW in fp32 reads four values of an element and writes three.
_ADAMW_BYTES = 28


@dataclass(frozen=True)
class Hardware:
    """A GPU in a node of several, and the node's network.

    Attributes:
        memory_bytes: of one GPU.
        memory_bytes_per_s: that it reads and writes.
        flops_per_s: of dense matrix products in bf16.
        ranks_per_node: GPUs that NVLink connects.
        nvlink_bytes_per_s, network_bytes_per_s, host_bytes_per_s: of one GPU, in one direction.
        sources: where these figures are published.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    ranks_per_node: int
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    sources: tuple[str, ...]

    def machine(
        self,
        *,
        compute_share: float = COMPUTE_SHARE,
        network_share: float = NETWORK_SHARE,
        memory_share: float = MEMORY_SHARE,
    ) -> Machine:
        """Return a machine that reaches these shares of the published rates."""
        hops = self.ranks_per_node  # of a ring in a node; one of them leaves it
        hop_s = ((hops - 1) * _NVLINK_HOP_S + _NETWORK_HOP_S) / hops
        rate = memory_share * self.memory_bytes_per_s
        nvlink = network_share * self.nvlink_bytes_per_s
        network = network_share * self.network_bytes_per_s
        return Machine(
            name=self.name,
            backend="nccl",
            memory_bytes=self.memory_bytes,
            ranks_per_node=self.ranks_per_node,
            inside=Link(nvlink, _COLLECTIVE_S, _NVLINK_HOP_S),
            between=Link(network, _COLLECTIVE_S, hop_s),
            copy_bytes_per_s=rate,
            optimizer_elements_per_s=rate / _ADAMW_BYTES,
            flops_per_s=compute_share * self.flops_per_s,
            host_bytes_per_s=network_share * self.host_bytes_per_s,
            workspace_bytes=_WORKSPACE_BYTES,
        )


_DGX_H100 = "NVIDIA DGX H100/H200 User Guide: 8 GPUs, 4 NVSwitches, 8 ConnectX-7 of 400 Gb/s"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM: 80 GB, 3.35 TB/s, 1,979 TFLOPS with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM: 141 GB, 4.8 TB/s, 1,979 TFLOPS with sparsity"
_B200 = "NVIDIA HGX B200 specification: 180 GB, 8 TB/s, 4.5 PFLOPS with sparsity, NVLink 1.8 TB/s"
_DGX_B200 = "NVIDIA DGX B200 data sheet: 8 GPUs, 1,440 GB, 64 TB/s, ConnectX-7 of 400 Gb/s"
_NVLINK = "the same: NVLink 900 GB/s in both directions, PCIe Gen5 128 GB/s in both directions"
_PAPER = "veScale-FSDP, arXiv 2602.22437: 8 GPUs a node, 979 TFLOPS, 80 GB, NVLink 400 GB/s"

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        each.name: each
        for each in (
            Hardware(
                "h100", 80_000_000_000, 3.35e12, 989.4e12, 8, 450e9, 50e9, 64e9,
                (_H100, _NVLINK, _DGX_H100),
            ),
            Hardware(
                "h200", 141_000_000_000, 4.8e12, 989.4e12, 8, 450e9, 50e9, 64e9,
                (_H200, _NVLINK, _DGX_H100),
            ),
            Hardware(
                "b200", 180_000_000_000, 8e12, 2250e12, 8, 900e9, 50e9, 64e9,
                (_B200, _DGX_B200),
            ),
            Hardware(
                "h800", 80_000_000_000, 3.35e12, 979e12, 8, 200e9, 50e9, 64e9,
                (_PAPER, "memory's rate, PCIe and network as of the H100: the paper has none"),
            ),
        )
    }
)  # fmt: skip


def published(name: str) -> Hardware:
    """Return the hardware of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in HARDWARE:
        raise ValueError(f"published hardware is {', '.join(HARDWARE)}; got {name!r}")
    return HARDWARE[name]
