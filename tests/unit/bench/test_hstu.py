"""`nestpipe bench hstu` at toy sizes: what it counts, and what it says."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nestpipe.bench.hstu.parts import HstuCase, measure_attention, measure_encoder, measure_step
from nestpipe.cli.app import app
from nestpipe.errors import ConfigError

TOY: dict[str, Any] = {
    "batch": 3, "length": 32, "heads": 2, "head_dim": 8, "blocks": 1, "dim": 16, "rounds": 2,
    "num_items": 100, "device": "cpu", "precision": "fp32",
}  # fmt: skip


def toy(**sizes: Any) -> HstuCase:
    return HstuCase(**{**TOY, **sizes})


@pytest.mark.parametrize("bias", ["none", "both"])
@pytest.mark.parametrize("lengths", ["full", "uniform", "zipf"])
def test_attention_is_timed_beside_torchs_where_sequences_are_as_long(lengths, bias):
    reading = measure_attention(toy(lengths=lengths, bias=bias))
    assert min(reading.forward, reading.backward, reading.both) > 0
    assert reading.form == "plain"
    assert (reading.peer_forward is not None) == (lengths == "full")
    assert reading.peer == ("torch" if lengths == "full" else None)
    assert reading.both_ms == reading.call_both_ms  # a host has no calls ahead
    assert reading.published is None


def test_published_figures_stand_beside_their_own_size():
    case = toy(length=256, head_dim=64, batch=1)
    assert measure_attention(case).published == (55, 67)


@pytest.mark.parametrize("lengths", ["full", "uniform", "zipf"])
def test_lengths_are_those_asked_for_and_the_same_every_time(lengths):
    case = toy(batch=400, length=1600, lengths=lengths)
    drawn = case.sample_lengths()
    assert torch.equal(drawn, case.sample_lengths())
    assert int(drawn.max()) == 1600
    assert int(drawn.min()) >= 100
    medians = {"full": (1600, 1600), "uniform": (800, 900), "zipf": (150, 250)}
    low, high = medians[lengths]
    assert low <= int(drawn.median()) <= high


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_an_encoder_tells_its_share_of_a_peak(kind):
    reading = measure_encoder(toy(kind=kind, peak_tflops=0.5))
    assert reading.mfu is not None
    assert math.isclose(reading.mfu, reading.tflops / 0.5)
    assert reading.memory_gb is None


def test_a_whole_step_tells_where_its_time_went():
    summary = measure_step(toy(rounds=4, peak_tflops=0.5))
    assert summary.tflops is not None
    assert summary.kinds["dense"].ms > 0


def test_the_command_writes_what_it_measured():
    sizes = "--length 16,32 --head-dim 8 --batch 2 --heads 1 --blocks 1 --dim 8 --rounds 1"
    command = f"bench hstu --parts attention,encoder {sizes} --device cpu --items 50 --json -"
    ran = CliRunner().invoke(app, command.split())
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert [row["bias"] for row in found["attention"]] == ["none", "both"] * 2
    assert [row["length"] for row in found["encoder"]] == [16, 32]


def test_what_cannot_be_measured_is_refused():
    for flags, sentence in (
        ("--parts gate", "there is no part 'gate'"),
        ("--length many", "length is 'many'"),
        ("--length 4", "length is 4; give 16"),
        ("--attention fast", "attention is 'fast'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            CliRunner().invoke(app, ["bench", "hstu", *flags.split()], catch_exceptions=False)


def test_a_call_that_is_stopped_leaves_the_figures_that_it_had(tmp_path, monkeypatch):
    """Each reading is in the file before the next begins."""
    measured: list[int] = []

    def measure(case: HstuCase, *, profile: bool = False) -> Any:
        if measured:
            raise ConfigError("stopped")
        measured.append(case.length)
        return measure_encoder(case, profile=profile)

    monkeypatch.setattr("nestpipe.bench.hstu.parts.measure_encoder", measure)
    sizes = "--batch 2 --length 16,32 --heads 1 --head-dim 8 --blocks 1 --dim 8 --rounds 1"
    command = f"bench hstu --parts encoder {sizes} --device cpu --json {tmp_path}/found.json"
    ran = CliRunner().invoke(app, command.split())
    assert ran.exit_code != 0
    (reading,) = json.loads((tmp_path / "found.json").read_text())["encoder"]
    assert reading["length"] == 16
