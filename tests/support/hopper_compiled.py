"""What Triton's compiler makes of the attention kernel of Hopper's warp groups, without a GPU.

    python tests/support/hopper_compiled.py [PART,WIDTH,ROWS,B,C[,BIASES] ...]

prints for each pass whether its products wait for each other, bytes of spills, what each round of
its loops spills, and how many products read registers that are written behind the point at which
the warps of a group have met. Without arguments: the passes that users get with heads of 64, 128
and 256. Needs Triton, whose ptxas and nvdisasm it asks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

SERIALIZED = "C7512"
"""What ptxas says of a function in which no two products of matrices are under way at a time."""
ROWS, HEADS, POSITIONS, BUCKETS, BLOCK = 4096, 4, 64, 32, 64


def compiled(part: Any, width: int, tile: Any, biases: str) -> str:
    """The pass in PTX, for sm_90a; `biases` are "", "positions", or "both"."""
    from nestpipe.kernels.attention import fused_launch, hopper_launch
    from nestpipe.kernels.attention.hopper_kernel import attend_by_groups

    q, k, v, grad = torch.zeros(4, ROWS, HEADS, width, dtype=torch.bfloat16)
    bias = fused_launch.PreparedBias()
    if biases == "positions":
        bias = fused_launch.PreparedBias(torch.zeros(HEADS, POSITIONS))
    elif biases:
        side = ROWS // BLOCK
        bias = fused_launch.PreparedBias(
            torch.zeros(HEADS, POSITIONS), torch.zeros(HEADS, BUCKETS),
            torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS + BLOCK, dtype=torch.int32),
            torch.zeros(1, side, side, dtype=torch.int32), side,
        )  # fmt: skip
    rule = (float(ROWS), width**-0.5, None, ROWS)
    samples = (torch.tensor([0, ROWS]), None)
    problem = fused_launch.make_problem((q, k, v), samples, bias, rule, hopper=True)
    sums = hopper_launch.bucket_sums(problem) if biases and part == "queries" else None
    made: list[Any] = []

    def warm_up(grid: Any, constants: Any, *given: Any) -> None:
        arguments = [argument for some in given for argument in some]
        made.append(attend_by_groups.warmup(*arguments, grid=grid, **constants.named))

    with mock.patch.object(hopper_launch, "_starter", return_value=warm_up):
        hopper_launch.run_part(problem, part, tile, grad, sums)
    return made[0].asm["ptx"]


def assembled(ptx: str) -> tuple[str, list[str], dict[str, int]]:
    """What ptxas says, its instructions, and where their labels are."""
    from triton import knobs  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source, "-o", made]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [knobs.nvidia.nvdisasm.path, "-c", made]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := re.match(r"\s*(\.L_\w+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(found[1])
    return said, code, labels


def spills_of(said: str) -> int:
    """Bytes that the whole function stores."""
    (spills,) = [line for line in said.splitlines() if "bytes spill stores" in line]
    return int(spills.split(",")[1].split()[0])


def spills_of_loops(code: list[str], labels: dict[str, int]) -> int:
    """Loads and stores of spills in the innermost loop that has most of them among products."""
    jumps = [(re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line), n) for n, line in enumerate(code)]
    loops = [(labels[of[1]], n) for of, n in jumps if of and labels[of[1]] <= n]
    bodies = {(a, b) for a, b in loops if any("HGMMA" in line for line in code[a : b + 1])}
    inner = [
        (a, b)
        for a, b in bodies
        if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in bodies)
    ]
    return max(sum(line.split()[0] in SPILLS for line in code[a:b]) for a, b in inner)


SPILLS = ("LDL", "STL", "LDL.64", "STL.64", "LDL.128", "STL.128", "LDL.LU", "LDL.LU.64")


def written_late(code: list[str]) -> int:
    """Products whose first operand, in registers, is written behind WARPGROUP.ARRIVE.

    Triton's PTX has such writes behind `wgmma.fence`; ptxas has to move the fence.
    """
    late = 0
    for n, line in enumerate(code):
        if not (product := re.match(r"HGMMA\.\S+ R\d+, R(\d+), gdesc", line)):
            continue
        operand = range(int(product[1]), int(product[1]) + 4)
        for before in reversed(code[:n]):
            if "WARPGROUP.ARRIVE" in before:
                break
            if _writes(before, operand):
                late += 1
                break
    return late


def _writes(line: str, registers: range) -> bool:
    found = re.match(r"(?:@!?U?P\d+ )?([A-Z0-9_.]+) (?:P\d+, )?R(\d+)\b", line)
    if found is None or found[1].startswith(("ST", "HGMMA", "RED")):
        return False
    name, first = found[1], int(found[2])
    count = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return bool(set(range(first, first + count)) & set(registers))


def chosen() -> Iterator[tuple[str, int, Any, str]]:
    """The passes without biases."""
    from nestpipe.kernels.attention.hopper_launch import GroupTiles

    for width in (64, 128, 256):
        tiles = GroupTiles.of(width)
        yield "forward", width, tiles.forward, ""
        yield "queries", width, tiles.queries, ""
        yield "only-keys" if tiles.values else "keys", width, tiles.keys, ""


def named(words: list[str]) -> Iterator[tuple[str, int, Any, str]]:
    """Those of the command line."""
    from nestpipe.kernels.attention.hopper_launch import GroupTile

    for word in words:
        part, width, *sizes = word.split(",")
        rows, b_stages, c_stages = map(int, sizes[:3])
        yield part, int(width), GroupTile(rows, b_stages, c_stages), "".join(sizes[3:])


def compile_for_hopper() -> None:
    """Triton compiles for Hopper, without a driver."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )


def main() -> None:
    """A line of JSON for each."""
    compile_for_hopper()
    for part, width, tile, biases in named(sys.argv[1:]) if sys.argv[1:] else chosen():
        said, code, labels = assembled(compiled(part, width, tile, biases))
        found = {
            "part": part, "width": width, "rows": tile.rows, "biases": biases,
            "serialized": SERIALIZED in said, "spills": spills_of(said),
            "spills in a loop": spills_of_loops(code, labels), "late": written_late(code),
        }  # fmt: skip
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
