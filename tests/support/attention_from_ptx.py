"""Attention's kernels as Triton compiles them for Hopper, run on the host, against the plain form.

    python tests/support/attention_from_ptx.py [CASE ...]
    python tests/support/attention_from_ptx.py broken

A line of JSON for each case and pass: the worst error, of the largest value. Needs Triton; the
PTX runs in `ptx_on_host`. Without arguments: all cases. `broken`: with mistakes put into the PTX,
each of which has to be told as an error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.gluon_on_host import attend
from support.hopper_compiled import compile_for_hopper
from support.ptx_on_host import Memory, TensorMap, Wrong, run

HEADS, NORM, SCALE = 2, 64.0, 0.3
_SWIZZLE = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class Case:
    """Samples, and which kernel's tiles read them: rows of a tile and lengths of both rings."""

    lengths: tuple[int, ...]
    parts: tuple[str, ...]
    width: int = 64
    tile: tuple[int, int, int] | None = None
    """None: the tiles that users get."""
    targets: tuple[int, ...] | None = None
    window: int | None = None
    positions: int = 0
    buckets: int = 0
    held: bool = False
    programs: int = 0
    """Of a persistent start; 0: one for each piece of work."""
    dtype: torch.dtype = torch.bfloat16
    sums: bool = False
    """Queries: also sums by bucket of time, beside those of the kernel's source over `Gluon`."""
    fused: bool = False
    """Triton's kernels, which were right on a GPU: they say whether this machine reads PTX well."""


ALL = ("forward", "queries", "keys")
CASES = {
    "small": Case((150, 1, 40), ALL, 64, (64, 2, 2), (20, 1, 0), 90, programs=2),
    "fused": Case((150, 1, 40), ALL, fused=True),
    "plain": Case((200, 0, 1, 65), ALL),
    "wide": Case((150,), ALL, 128),
    "small tiles": Case((150, 70), ALL, 128, (64, 2, 2), programs=2),
    "widest": Case((140,), ("forward", "queries", "only-keys", "values"), 256),
    "masked": Case((300, 90), ALL, 64, (64, 2, 3), (40, 90), 100, programs=3),
    "held": Case((150,), ("forward",), 128, (128, 2, 2), held=True),
    "half": Case((130,), ALL, dtype=torch.float16),
    "both biases": Case((330,), ALL, 64, (64, 2, 2), (33,), None, 70, 20),
    "sums": Case((300,), ("queries",), 64, (64, 2, 2), positions=20, buckets=8, sums=True),
    "wide and biased": Case((260,), ALL, 128, None, None, None, 9, 12),
    "widest and biased": Case(
        (140,), ("forward", "queries", "only-keys", "values"), 256, None, None, None, 9, 12
    ),
}


BROKEN = {
    "no fence": ("queries", "fence.proxy.async.shared::cta;", ""),
    "no wait for products": ("queries", "wgmma.wait_group.sync.aligned 0;", ""),
    "one product less is waited for": (
        "forward", "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"
    ),
    "no fence of products": ("queries", "wgmma.fence.sync.aligned;", ""),
    "fewer bytes": ("forward", ", 8192;", ", 4096;"),
    "registers": ("forward", "setmaxnreg.dec.sync.aligned.u32 \t24;", ""),
}  # fmt: skip
"""Part, and what is put in place of what, everywhere in its PTX."""


class Machine:
    """Tensors of the host in the memory of the machine that runs PTX."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.known: dict[int, tuple[int, Tensor]] = {}
        self.change: Callable[[str], str] = lambda text: text
        """Of the PTX."""

    def address(self, x: Tensor) -> int:
        """Of a tensor's first number; all of its storage is copied once."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.known:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.known[storage.data_ptr()] = self.memory.put(flat.numpy()), flat
        return self.known[storage.data_ptr()][0] + int(x.storage_offset()) * x.element_size()

    def bring_back(self) -> None:
        """What kernels have written, into the tensors."""
        for address, flat in self.known.values():
            flat.copy_(torch.from_numpy(self.memory.get(address, flat.numpy())))

    def start(self, kernel: Any, grid: Any, constants: Any, *given: Any) -> None:
        """In place of a `Starter`: compile, and run every program."""
        arguments = [argument for some in given for argument in some]
        compiled = kernel.warmup(*arguments, grid=grid, **constants.named)
        metas = iter(compiled.metadata.tensordesc_meta or [])
        passed: list[Any] = []
        signature = compiled.src.signature
        for value, kind in zip(arguments, signature.values(), strict=False):
            if kind.startswith("tensordesc"):
                passed += [self._map(value, next(metas)), *value.shape, *value.strides]
            elif isinstance(value, Tensor):
                passed.append(self.address(value))
            elif kind != "constexpr":
                passed.append(float(value) if kind.startswith("fp") else value)
        text = self.change(compiled.asm["ptx"])
        for _ in run(text, self.memory, [*passed, 0, 0], grid[0]):
            pass
        self.bring_back()

    def _map(self, of: Any, meta: Any) -> TensorMap:
        size = of.base.element_size()
        return TensorMap(
            self.address(of.base),
            tuple(reversed(of.shape)),
            tuple(size * stride for stride in reversed(of.strides)),
            tuple(reversed(meta["block_size"])),
            _SWIZZLE[meta["swizzle"]],
        )


def rows_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as an encoder has them, side by side; and a gradient."""
    generator = torch.Generator().manual_seed(1)
    total = sum(case.lengths)
    packed = torch.randn(total, 3, HEADS, case.width, generator=generator).to(case.dtype)
    grad = torch.randn(total, HEADS, case.width, generator=generator).to(case.dtype)
    v, q, k = packed.unbind(1)
    return q, k, v, grad


def bias_of(case: Case) -> RelativeBias:
    generator = torch.Generator().manual_seed(2)
    sizes = (case.positions, case.buckets)
    tables = [torch.randn(HEADS, n, generator=generator) if n else None for n in sizes]
    times = None
    if case.buckets:
        gaps = 2 ** torch.randint(0, case.buckets + 1, (sum(case.lengths),), generator=generator)
        gaps = torch.where(torch.rand(len(gaps), generator=generator) < 0.8, 0, gaps)
        times = torch.cumsum(gaps, 0)
        if case.sums:  # long pauses between few sessions: most tiles have one bucket or two
            times = torch.arange(len(gaps)) // 150 * (1 << case.buckets - 3)
    return RelativeBias(tables[0], tables[1], times)


def wanted(case: Case, rows: tuple[Tensor, ...], offsets_B: Tensor, mask: Mask) -> dict[str, Any]:
    """Of each pass, by the plain form in float64."""
    q, k, v = (x.double().requires_grad_() for x in rows[:3])
    bias = bias_of(case)
    tables = [x if x is None else x.double() for x in (bias.position_HP, bias.time_HQ)]
    out = hstu_attention(
        q, k, v, offsets_B, norm=NORM, scale=SCALE, mask=mask,
        bias=RelativeBias(tables[0], tables[1], bias.times_T), max_attention=case.window,
    )  # fmt: skip
    of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), rows[3].double())
    return {"forward": [out.detach()], "queries": [of_q], "keys": [of_k, of_v],
            "only-keys": [of_k], "values": [of_v]}  # fmt: skip


def prepared_bias(case: Case, machine: Machine) -> Any:
    """Tables and times as the kernels want them, by the kernel that makes them."""
    from nestpipe.kernels.attention import fused_launch as launch

    kernel = launch._PREPARE_BIASES.kernel
    offsets_B = torch.tensor([0, *accumulate(case.lengths)])
    with mock.patch.object(launch, "_PREPARE_BIASES", lambda *given: machine.start(kernel, *given)):
        return launch.prepare_bias(bias_of(case), offsets_B, max(case.lengths))


def found(case: Case, part: Any, change: Callable[[str], str] | None = None) -> list[Tensor]:
    """What the compiled pass writes; `change` is put into its PTX."""
    from nestpipe.kernels.attention import fused_launch, hopper_launch
    from nestpipe.kernels.attention.hopper_kernel import attend_by_groups
    from nestpipe.kernels.attention.hopper_launch import GroupTile, GroupTiles

    rows = rows_of(case)
    offsets_B = torch.tensor([0, *accumulate(case.lengths)])
    targets_B = None if case.targets is None else torch.tensor(case.targets)
    machine = Machine()
    machine.change = change or machine.change

    prepared = prepared_bias(case, machine)
    rule = (NORM, SCALE, case.window, max(case.lengths))
    samples = (offsets_B, targets_B)
    problem = fused_launch.make_problem(rows[:3], samples, prepared, rule, hopper=not case.fused)
    if case.fused:
        return found_fused(problem, part, rows[3], machine)
    tiles = GroupTiles.of(case.width, timed=prepared.half_time_HQ is not None)
    tile = tiles.keys if part == "only-keys" else getattr(tiles, part)
    if case.tile is not None:
        tile = GroupTile(*case.tile, held=case.held, persistent=bool(case.programs))

    def start(grid: Any, *given: Any) -> None:
        programs = min(grid[0], case.programs or grid[0])
        machine.start(attend_by_groups, (programs,), *given)

    sums_HXQ = hopper_launch.bucket_sums(problem) if case.sums else None
    device = SimpleNamespace(multi_processor_count=case.programs)
    with (
        mock.patch.object(hopper_launch, "_starter", return_value=start),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
    ):
        made = hopper_launch.run_part(problem, part, tile, rows[3], sums_HXQ)
    return made if sums_HXQ is None else [*made, sums_HXQ.sum(1)]


def sums_by_source(case: Case, prepared: Any) -> Tensor:
    """(H, Q) what the kernel's source sums by bucket of time, over a model of Gluon."""
    q, k, v, grad = rows_of(case)
    assert case.tile is not None
    rows, b_stages, c_stages = case.tile
    wanted_of = {
        "KEYS": False, "GRAD": True, "VALUES": False, "N": rows, "B_STAGES": b_stages,
        "C_STAGES": c_stages, "P": prepared.num_positions, "Q": prepared.num_buckets,
        "BUCKETS": 1 << (prepared.num_buckets - 1).bit_length(),
    }  # fmt: skip
    samples = torch.tensor([0, *accumulate(case.lengths)]), None, max(case.lengths)
    tables = (
        prepared.half_position_HP, prepared.half_time_HQ, prepared.times_T, prepared.short_T,
        prepared.kinds_BXY, prepared.side,
    )  # fmt: skip
    numbers = (SCALE / 2, 1 / NORM, case.window)
    *_, sums_HXQ = attend(
        wanted_of, (q, grad, k, v), samples, numbers, programs=99, seed=0, tables=tables
    )
    assert sums_HXQ is not None
    return sums_HXQ.nan_to_num().sum(1)


def found_fused(problem: Any, part: Any, grad: Tensor, machine: Machine) -> list[Tensor]:
    """What Triton's kernel of a pass writes."""
    from nestpipe.kernels.attention import fused_launch as launch

    kernels = {"forward": "_FORWARD", "queries": "_BACKWARD_QUERIES", "keys": "_BACKWARD_KEYS"}
    kernel = getattr(launch, kernels[part]).kernel
    with mock.patch.object(launch, kernels[part], lambda *given: machine.start(kernel, *given)):
        if part == "forward":
            return [launch.run_forward(problem)]
        if part == "queries":
            return [launch.run_backward_queries(problem, grad)[0]]
        return list(launch.run_backward_keys(problem, grad))


def error_of(made: list[Tensor], right: list[Tensor]) -> float:
    """The worst, of the largest value; NaN never passes."""
    errors = [
        (a.double() - b).abs().max() / b.abs().max() for a, b in zip(made, right, strict=True)
    ]
    return float(torch.stack(errors).nan_to_num(nan=1e9).max())


def tell_broken() -> None:
    """A line for each mistake: what was told of it."""
    case = CASES["small"]
    for name, (part, right, wrong) in BROKEN.items():

        def change(text: str, right: str = right, wrong: str = wrong) -> str:
            assert right in text, f"{right!r} is not there"
            return text.replace(right, wrong)

        try:
            found(case, part, change)
            said = ""
        except Wrong as error:
            said = str(error)[:100]
        print(json.dumps({"broken": name, "said": said}), flush=True)


def main() -> None:
    compile_for_hopper()
    if sys.argv[1:] == ["broken"]:
        return tell_broken()
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        offsets_B = torch.tensor([0, *accumulate(case.lengths)])
        mask = Mask(None if case.targets is None else torch.tensor(case.targets))
        right = wanted(case, rows_of(case), offsets_B, mask)
        for part in case.parts:
            began = time.perf_counter()
            wanted_of = right[part]
            if case.sums:
                wanted_of = [*wanted_of, sums_by_source(case, prepared_bias(case, Machine()))]
            error = error_of(found(case, part), wanted_of)
            seconds = round(time.perf_counter() - began, 1)
            print(
                json.dumps({"case": name, "part": part, "error": error, "s": seconds}), flush=True
            )


if __name__ == "__main__":
    main()
