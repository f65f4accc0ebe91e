"""The kernel of Hopper's warp groups on the host, over a model of Gluon; and who may ask for it."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention import fused, hopper_launch
from nestpipe.kernels.attention.fused import kernels_attend
from nestpipe.kernels.attention.hopper_launch import WIDTHS, GroupTile, GroupTiles
from nestpipe.kernels.attention.reference import (
    NO_BIAS,
    Mask,
    RelativeBias,
    hstu_attention,
)
from nestpipe.models.sequence import EncoderOptions
from support import gluon_on_host
from support.gluon_on_host import Wrong, attend
from support.tools import ROOT

NORM, SCALE, HEADS, BOUND = 64.0, 0.3, 2, 1e-2
MOST_SHARED = 227 << 10
"""Bytes of shared memory of a program on Hopper."""
PASSES = {
    "forward": {"KEYS": False, "GRAD": False, "VALUES": True},
    "queries": {"KEYS": False, "GRAD": True, "VALUES": False},
    "keys": {"KEYS": True, "GRAD": True, "VALUES": False},
    "values": {"KEYS": True, "GRAD": False, "VALUES": True},
    "both": {"KEYS": True, "GRAD": True, "VALUES": True},
}


SMALL = GroupTile(64, 2, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """Samples, and how a pass reads them."""

    lengths: list[int]
    targets: list[int] | None = None
    window: int | None = None
    tile: GroupTile = SMALL
    programs: int = 1 << 20
    positions: int = 0
    time_buckets: int = 0
    width: int = 64
    seed: int = 0


CASES = {
    "one row": Case([1]),
    "edges": Case([65, 0, 1, 128, 129, 63], tile=GroupTile(128, 2, 2)),
    "candidates": Case([300, 90], [40, 90], tile=GroupTile(64, 3, 2)),
    "window": Case([400, 77], [30, 77], 100),
    "persistent": Case([300, 1, 130], [9, 0, 0], programs=2, tile=GroupTile(64, 3, 3)),
    "held": Case([300, 65], programs=3, tile=GroupTile(128, 2, 2, held=True)),
    "positions": Case([300, 90], [20, 0], positions=9),
    "times": Case([260, 70], time_buckets=12, tile=GroupTile(128, 2, 2)),
    "both biases": Case([330], [33], 150, positions=70, time_buckets=20),
    "wide": Case([200], width=128),
    "narrow": Case(
        [330, 70], [33, 0], 150, GroupTile(32, 3, 3), positions=70, time_buckets=20, width=128
    ),
    "rings of one": Case([300, 65], programs=2, tile=GroupTile(64, 1, 1)),
}


@dataclass(frozen=True, slots=True)
class World:
    """A case's rows, tables and times, and its gradients by the plain form in float64."""

    case: Case
    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    bias: RelativeBias

    @classmethod
    def of(cls, case: Case) -> World:
        generator = torch.Generator().manual_seed(case.seed)
        shape = (4, sum(case.lengths), HEADS, case.width)
        q, k, v, grad = torch.randn(*shape, generator=generator).bfloat16()
        sizes = (case.positions, case.time_buckets)
        tables = [torch.randn(HEADS, n, generator=generator) if n else None for n in sizes]
        gaps = 2 ** torch.randint(0, case.time_buckets + 1, (shape[1],), generator=generator)
        gaps = torch.where(torch.rand(shape[1], generator=generator) < 0.7, 0, gaps)
        times = torch.cumsum(gaps, 0) if case.time_buckets else None
        return cls(case, (q, k, v, grad), RelativeBias(tables[0], tables[1], times))

    def samples(self) -> tuple[Tensor, Tensor | None, int]:
        case = self.case
        offsets_B = torch.tensor([0, *itertools.accumulate(case.lengths)])
        return (
            offsets_B,
            None if case.targets is None else torch.tensor(case.targets),
            max(case.lengths),
        )

    def wanted(self) -> dict[str, list[Tensor]]:
        offsets_B, targets_B, _ = self.samples()
        q, k, v = (x.double().requires_grad_() for x in self.rows[:3])
        tables = [
            x if x is None else x.double() for x in (self.bias.position_HP, self.bias.time_HQ)
        ]
        out = hstu_attention(
            q, k, v, offsets_B, norm=NORM, scale=SCALE, mask=Mask(targets_B),
            bias=RelativeBias(tables[0], tables[1], self.bias.times_T),
            max_attention=self.case.window,
        )  # fmt: skip
        grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), self.rows[3].double())
        return {
            "forward": [out.detach()],
            "queries": [grad_q],
            "keys": [grad_k],
            "values": [grad_v],
            "both": [grad_k, grad_v],
        }

    def found(self, name: str, **more: int) -> list[Tensor]:
        case, (q, k, v, grad) = self.case, self.rows
        rows = (k, v, q, grad) if PASSES[name]["KEYS"] else (q, grad, k, v)
        tile = {"N": case.tile.rows, "B_STAGES": case.tile.b_stages, "C_STAGES": case.tile.c_stages}
        buckets = {"P": max(1, case.positions), "Q": max(1, case.time_buckets)}
        held = {"HELD": case.tile.held and not PASSES[name]["GRAD"]}
        sums = attend(
            {**PASSES[name], **tile, **buckets, **held, **more}, rows, self.samples(),
            (SCALE / 2, 1 / NORM, case.window), programs=case.programs, seed=case.seed,
            tables=self.tables(),
        )  # fmt: skip
        return [x for x in sums if x is not None]

    def tables(self) -> tuple[Any, ...]:
        """What `prepare_biases` makes: halves of tables, short times, and kinds of blocks."""
        position_HP, time_HQ = self.bias.position_HP, self.bias.time_HQ
        times_T = self.bias.times_T
        half = [x if x is None else x / 2 for x in (position_HP, time_HQ)]
        side = -(-max(self.case.lengths) // 64)
        if times_T is None:
            return (*half, None, None, None, side)
        kinds_BXY = torch.zeros(len(self.case.lengths), side, side, dtype=torch.int32)
        buckets = self.case.time_buckets
        for kinds_XY, times in zip(kinds_BXY, times_T.split(self.case.lengths), strict=True):
            blocks = times.split(64)
            for (x, late), (y, early) in itertools.product(enumerate(blocks), repeat=2):
                bits = [
                    max(0, int(n)).bit_length() for n in (late[0] - early[-1], late[-1] - early[0])
                ]
                low, high = (min(n, buckets - 1) for n in bits)
                kinds_XY[x, y] = low | high << 8
        short_T = torch.cat([times_T, times_T.new_zeros(128)]).int()
        return (*half, times_T, short_T, kinds_BXY, side)


def error_of(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The worst, of the largest value; NaN, which an unwritten row is, never passes."""
    errors = [
        (a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(errors).nan_to_num(nan=1e9).max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("part", PASSES)
def test_it_is_the_plain_form(part: str, name: str):
    world = World.of(CASES[name])
    assert error_of(world.found(part), world.wanted()[part]) < BOUND


@pytest.mark.parametrize("part", PASSES)
def test_order_of_threads_and_number_of_programs_change_no_bit(part: str):
    draw = random.Random(0)
    case = Case([200, 70, 1], [20, 70, 0])
    first = World.of(case).found(part)
    for _ in range(3):
        tile = GroupTile(64, draw.randint(2, 4), draw.randint(2, 4))
        other = replace(World.of(case), case=replace(case, programs=draw.randint(1, 9), tile=tile))
        assert all(torch.equal(a, b) for a, b in zip(first, other.found(part), strict=True))


@pytest.mark.parametrize("part", PASSES)
def test_a_sample_has_the_same_bits_alone_and_beside_rows_that_are_no_numbers(part: str):
    case = Case([100, 130, 40], [5, 30, 0])
    world = World.of(case)
    for x in world.rows:
        x[:100] = x[230:] = float("nan")
    alone = World(Case([130], [30]), tuple(x[100:230] for x in world.rows), NO_BIAS)  # type: ignore[arg-type]
    for together, apart in zip(world.found(part), alone.found(part), strict=True):
        assert torch.equal(together[100:230], apart)


def easy_sums(world: World) -> Tensor:
    """(H, Q) gradients of scores by bucket of time, twice, of tiles that all see and are easy."""
    case, rows = world.case, world.case.tile.rows
    q, k, v, grad = (x.double().transpose(0, 1) for x in world.rows)
    *_, kinds_BXY, _ = world.tables()
    times = world.bias.times_T
    position_HP, time_HQ = world.bias.position_HP, world.bias.time_HQ
    assert times is not None
    assert time_HQ is not None
    score = SCALE * q @ k.mT
    later = (times[:, None] - times[None, :]).clamp(min=0)
    bucket = (later > 0) * (1 + later.clamp(min=1).double().log2().floor())
    bucket = bucket.clamp(max=time_HQ.shape[1] - 1).long()
    score = score + time_HQ.double()[:, bucket]
    if position_HP is not None:  # easy tiles are far away
        score = score + position_HP.double()[:, -1:, None]
    sigmoid = score.sigmoid()
    pairs = 2 * grad @ v.mT * sigmoid * (1 + score * (1 - sigmoid))
    sums = torch.zeros(time_HQ.shape, dtype=torch.float64)
    for first in range(0, case.lengths[0], 128):
        for key in range(0, first // rows * rows, rows):
            kinds = kinds_BXY[
                0, first // 64 : first // 64 + 2, key // 64 : (key + rows - 1) // 64 + 1
            ]
            low, high = int((kinds & 0xFF).min()), int((kinds >> 8).max())
            if high - low > 1 or first - (key + rows - 1) < case.positions - 1:
                continue
            part = slice(first, first + 128), slice(key, key + rows)
            for number in range(time_HQ.shape[1]):
                sums[:, number] += (pairs[:, *part] * (bucket[part] == number)).sum((1, 2))
    return sums


@pytest.mark.parametrize(
    "case",
    [
        Case([460], time_buckets=9),
        Case([300], time_buckets=8, positions=20, tile=GroupTile(32, 3, 3)),
        Case([700], time_buckets=16, positions=100),
        Case([500], time_buckets=7, tile=GroupTile(128, 2, 2), programs=2),
    ],
)
def test_the_gradient_of_queries_sums_easy_tiles_by_bucket(case: Case):
    world = World.of(case)
    assert world.bias.times_T is not None
    # Long pauses between few sessions: most tiles have one bucket or two.
    paused = torch.arange(case.lengths[0]) // 150 * (1 << case.time_buckets - 3)
    world.bias.times_T.copy_(paused)
    found, sums_HXQ = world.found("queries", BUCKETS=16)
    assert error_of([found], world.wanted()["queries"]) < BOUND
    wanted_HQ = easy_sums(world)
    assert (wanted_HQ != 0).sum(1).min() >= 2
    sums_HQ = sums_HXQ.nan_to_num().sum(1)[:, : case.time_buckets]
    assert error_of([sums_HQ], [wanted_HQ]) < BOUND


BROKEN = {
    "nothing": ("both", "GROUPS", "GROUPS"),
    "a tile is given back before its products are done": (
        "forward",
        "    score_RN = warpgroup_mma_wait(1, [token])\n    release_tile(b_ring, number, B)",
        "    release_tile(b_ring, number, B)\n    score_RN = warpgroup_mma_wait(1, [token])",
    ),
    "nobody waits for the copy": (
        "queries",
        "    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)\n",
        "",
    ),
    "the phase is another": ("both", "(count // STAGES) & 1) ^ 1", "(count // STAGES) & 1)"),
    "own rows are copied over": (
        "values",
        "            mbarrier.wait(own_empty, (pieces & 1) ^ 1)\n",
        "",
    ),
    "no fence behind stores": ("keys", "            fence_async_shared()\n", ""),
    "rows past the end count": (
        "both",
        "        if at + N > length:\n            zero_rows_past(b_tile",
        "        if at > length:\n            zero_rows_past(b_tile",
    ),
    "a tile is given back while gradients are added up over it": (
        "queries",
        "        sum_b_RA, _ = warpgroup_mma_wait(0, [sum_b_RA, operand_RN])\n"
        "    release_tile(b_ring, number, B)\n",
        "        release_tile(b_ring, number, B)\n"
        "        sum_b_RA, _ = warpgroup_mma_wait(0, [sum_b_RA, operand_RN])\n",
    ),
    "one product less is waited for": (
        "queries",
        "grad_RN = warpgroup_mma_wait(0, [grad_RN])",
        "grad_RN = warpgroup_mma_wait(1, [grad_RN])",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_of_gluon_sees_mistakes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    part, right, wrong = BROKEN[name]
    for file in gluon_on_host.MODULES:
        text = (gluon_on_host.SOURCE / f"{file}.py").read_text()
        if file == "hopper_kernel":
            assert right in text
            text = text.replace(right, wrong)
        (tmp_path / f"{file}.py").write_text(text)
    monkeypatch.setattr(gluon_on_host, "SOURCE", tmp_path)
    world = World.of(Case([420, 140], programs=1, tile=GroupTile(64, 2, 3)))
    wanted = [x[:420] for x in world.wanted()[part]]
    for x in world.rows:
        x[420:] = float("nan")
    seen = False
    for seed in range(60 if right != wrong else 8):
        tried = replace(world, case=replace(world.case, seed=seed))
        try:
            seen = error_of([x[:420] for x in tried.found(part)], wanted) >= BOUND
        except (Wrong, AssertionError):
            seen = True
        if seen:
            break
    assert seen == (right != wrong)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("timed", [False, True])
def test_tiles_fit_into_shared_memory(width: int, timed: bool):
    tiles = GroupTiles.of(width, timed=timed)
    parts = {"forward": (tiles.forward, False), "queries": (tiles.queries, True)}
    parts |= {"keys": (tiles.keys, True)}
    if tiles.values is not None:
        parts |= {"values": (tiles.values, False)}
    for tile, gradients in parts.values():
        assert tile.shared_bytes(width, gradients=gradients) + 1024 <= MOST_SHARED


def said_by(script: str, *words: str) -> list[dict[str, Any]]:
    """Lines of JSON of a program that has Triton's compiler for itself."""
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    said = subprocess.run(
        [sys.executable, str(ROOT / "tests/support" / script), *words],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in said.stdout.splitlines()]


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with torch for GPUs alone"
)


@needs_triton
@pytest.mark.parametrize("case", ["fused", "small", "plain", "small tiles", "held", "sums"])
def test_what_the_compiler_has_made_of_it_is_the_plain_form(case: str):
    """Its PTX, instruction by instruction: swizzles, descriptors, barriers, fences, registers."""
    found = said_by("attention_from_ptx.py", case)
    assert found
    assert all(of["error"] < BOUND for of in found), found


@needs_triton
def test_mistakes_in_what_the_compiler_has_made_are_seen():
    found = said_by("attention_from_ptx.py", "broken")
    assert len(found) >= 5
    assert all(of["said"] for of in found), found


@needs_triton
def test_the_compiler_lets_products_overlap():
    """A product that is under way from one round of a loop to the next makes all of them wait."""
    found = said_by("hopper_compiled.py")
    assert len(found) == 9
    for of in found:
        assert not of["serialized"], of
        assert of["spills"] <= 128, of
        assert of["spills in a loop"] <= 16, of
        assert not of["late"], of


def test_an_encoder_that_asks_for_it_by_name_gets_it_or_an_error(monkeypatch: pytest.MonkeyPatch):
    rows = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="attention is 'hopper', but the rows are not on a GPU"):
        kernels_attend("hopper", rows, 64, NO_BIAS)
    with pytest.raises(ConfigError, match="time is 'next'"):
        EncoderOptions(time="next", time_buckets=4, attention="hopper")
    monkeypatch.setattr(fused, "_why_not_fused", lambda *_: None)
    monkeypatch.setattr(hopper_launch, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels_attend("hopper", rows, 64, NO_BIAS)
    with pytest.raises(ConfigError, match="a head is 96 wide, not 64, 128 or 256"):
        kernels_attend("hopper", rows, 96, NO_BIAS)
    with pytest.raises(ConfigError, match=r"rows are torch.float32"):
        kernels_attend("hopper", rows.float(), 64, NO_BIAS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "B200")
    with pytest.raises(ConfigError, match="B200 is no Hopper GPU"):
        kernels_attend("hopper", rows, 64, NO_BIAS)
