"""What Triton's compiler makes of the attention kernel of Hopper's warp groups, without a GPU.

    python tests/support/hopper_compiled.py [PART,WIDTH,ROWS,B,C[,BIASES] ...]

prints for each pass whether its products wait for each other, and bytes of spills. Without
arguments: the passes that users get with heads of 64 and 128. Needs Triton, whose ptxas it asks.
"""

from __future__ import annotations

import json
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


def said_by_ptxas(ptx: str) -> tuple[bool, int]:
    """Whether products wait for each other, and bytes of spills."""
    from triton import knobs  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (spills,) = [line for line in said.splitlines() if "bytes spill stores" in line]
    return SERIALIZED in said, int(spills.split(",")[1].split()[0])


def chosen() -> Iterator[tuple[str, int, Any, str]]:
    """The passes of heads of 64 and 128 without biases."""
    from nestpipe.kernels.attention.hopper_launch import GroupTiles

    for width in (64, 128):
        tiles = GroupTiles.of(width)
        for part in ("forward", "queries", "keys"):
            yield part, width, getattr(tiles, part), ""


def named(words: list[str]) -> Iterator[tuple[str, int, Any, str]]:
    """Those of the command line."""
    from nestpipe.kernels.attention.hopper_launch import GroupTile

    for word in words:
        part, width, *sizes = word.split(",")
        rows, b_stages, c_stages = map(int, sizes[:3])
        yield part, int(width), GroupTile(rows, b_stages, c_stages), "".join(sizes[3:])


def main() -> None:
    """A line of JSON for each."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    for part, width, tile, biases in named(sys.argv[1:]) if sys.argv[1:] else chosen():
        serialized, spills = said_by_ptxas(compiled(part, width, tile, biases))
        found = {"part": part, "width": width, "rows": tile.rows, "biases": biases}
        print(json.dumps({**found, "serialized": serialized, "spills": spills}), flush=True)


if __name__ == "__main__":
    main()
