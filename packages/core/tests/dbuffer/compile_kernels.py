"""Print what the kernels are for GPUs of some capabilities, in PTX. No GPU is needed for that.

python compile_kernels.py 80 90
"""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vescale_fsdp.dbuffer import codec_kernels


def ptx(kernel: Any, capability: int, flags: dict[str, bool]) -> str:
    """Of numbers in float32, so that those of 16 bits are raw ones."""
    pointers = {"rows": "*i64", "piece_of": "*i32", "numbers": "*fp32", "kept_scales": "*fp32"}
    pointers |= {"messages": "*u8", "own": "*u8"}
    constants = {"RAW": tl.bfloat16, "BLOCKS": 4, "ROWS": 4, "COLUMNS": 32, **flags}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    text: str = triton.compile(source, target=target, options=codec_kernels.OPTIONS).asm["ptx"]
    return text


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        print(ptx(codec_kernels.encode_kernel, capability, {}))
        for subtracts in (False, True):
            flags = {"KEEPS": False, "SUBTRACTS": subtracts}
            print(ptx(codec_kernels.decode_kernel, capability, flags))
