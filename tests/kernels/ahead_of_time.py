"""Compiles every Triton kernel for one GPU, without one, and prints the registers and spills of each as JSON.

    python -m tests.kernels.ahead_of_time cuda 90

It runs in a process of its own: other tests run the same kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from inspect import signature
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcanary_agent.kernels.triton import TritonChecks, content, measured_writes, reads, writes

# Constants of a Llama-3-8B in bfloat16 with blocks of 16, a batch of up to 256 rows, and everything known.
CONSTANTS: dict[str, Any] = {
    "HAS_HELD": True,
    "HAS_TOKENS": True,
    "HAS_LENGTHS": True,
    "MEASURE_ONLY": False,
    "TRANSFER": True,
    "WORD": 4,
    "PARTS": 64,
    "WORD_TILE": TritonChecks.word_tile,
    "ROWS": 256,
    "BLOCK": 16,
}
TILES = {
    "check_writes_kernel": TritonChecks.token_tile,
    "enter_writes_kernel": TritonChecks.token_tile,
    "enter_measured_writes_kernel": TritonChecks.token_tile,
    "verify_reads_kernel": TritonChecks.read_tile,
    "record_content_kernel": TritonChecks.word_tile,
}
BLOCK_TILE = TritonChecks.block_tile // CONSTANTS["BLOCK"]
# What an engine hands over is of four bytes here, and may be of eight.
POINTERS = {
    "table": "i64",
    "block_generation": "i32",
    "fingerprints": "i64",
    "parts": "i64",
    "all_keys": "i32",
    "owners": "i32",
    "seeds": "i64",
    "prefix_lens": "i32",
    "block_table": "i32",
    "held": "u8",
    "held_rows": "i64",
    "references": "i32",
    "first_holders": "i32",
    "write_rows": "i64",
    "offsets": "i32",
    "new_tokens": "i64",
    "positions": "i64",
    "slots": "i64",
    "blocks": "i64",
    "tokens": "i32",
    "known_rows": "i32",
    "lengths": "i32",
    "pad_slots": "i32",
    "step_tokens": "i32",
    "step_positions": "i32",
    "step_slots": "i32",
    "kept_rows": "i64",
    "kept_tokens": "i64",
    "kept_positions": "i64",
    "kept_slots": "i64",
    "sums": "i64",
    "totals": "i64",
    "flags": "i8",
    "ring": "i64",
    "ring_count": "i64",
    "tallies": "i64",
}
KERNELS = [
    writes.check_writes_kernel,
    writes.enter_writes_kernel,
    measured_writes.enter_measured_writes_kernel,
    reads.verify_reads_kernel,
    content.record_content_kernel,
    content.verify_content_kernel,
    content.verify_blocks_kernel,
    content.check_null_block_kernel,
]


def compile_kernel(kernel: Any, target: GPUTarget) -> dict[str, int]:
    """Registers and spilled bytes of a kernel."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name in signature(kernel.fn).parameters:
        if name == "TILE":
            types[name], constants[name] = "constexpr", TILES.get(kernel.fn.__name__, BLOCK_TILE)
        elif name in CONSTANTS:
            types[name], constants[name] = "constexpr", CONSTANTS[name]
        else:
            types[name] = f"*{POINTERS[name]}" if name in POINTERS else "i32"
    compiled = triton.compile(ASTSource(kernel, types, constants), target=target)
    if target.backend == "hip":
        return amd_usage(compiled.asm["amdgcn"])
    return nvidia_usage(compiled.asm["ptx"], int(target.arch))


def nvidia_usage(ptx: str, arch: int) -> dict[str, int]:
    """What ``ptxas -v`` says of Triton's PTX, as Triton's own ``ptxas`` assembles it."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # Triton's PTX may be of a version that only the newer of the two assemblers knows; that one knows all targets.
    ptxas = next(path for name in ("ptxas-blackwell", "ptxas") if (path := folder / name).exists())
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernel.ptx"
        source.write_text(ptx)
        result = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{arch}{suffix}", source, "-o", Path(temporary) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        )
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", result.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", result.stderr)
    return {"registers": int(registers), "spills": int(stores) + int(loads)}


def amd_usage(assembly: str) -> dict[str, int]:
    """What the metadata of the code object says."""

    def figure(name: str) -> int:
        (value,) = re.findall(rf"\.{name}:\s*(\d+)", assembly)
        return int(value)

    return {
        "registers": figure("vgpr_count"),
        # Scalar registers spill into lanes of vector registers, not into memory.
        "spills": figure("vgpr_spill_count") + figure("private_segment_fixed_size"),
    }


def main(backend: str, arch: str) -> None:
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    print(json.dumps({kernel.fn.__name__: compile_kernel(kernel, target) for kernel in KERNELS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
