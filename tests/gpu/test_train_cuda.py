"""The same training code on a GPU: it matches the CPU within the bound, and itself bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import verify_world as world

PROGRAM = Path(__file__).with_name("program.py")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
STEPS, CLOSE_STEPS = 50, 8
"""Of runs that must be equal, and of those that may differ by rounding. Where a gradient is nearly
zero its direction is rounding too, and Adam and Adagrad make a whole step of it: a GPU and a CPU
are 1e-5 apart behind 8 steps, 2e-3 behind 11 and 5e-2 behind 15, in single rows."""


def train(
    folder: Path, device: str, ranks: int = 1, *settings: str, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    out = folder / f"{device}-{ranks}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", str(PROGRAM), str(out), device, str(steps), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, world.ends_of(done.stderr)
    return torch.load(out, weights_only=True)


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Losses to 1e-5; weights, by the largest of their tensor, to 1e-4 on average and 0.05 each.

    A gradient whose sign is rounding moves its weight by a whole step, and only that.
    """
    assert first.keys() == second.keys()
    torch.testing.assert_close(first["losses"], second["losses"], rtol=1e-5, atol=1e-6)
    for name, value in first.items():
        largest, apart = float(value.abs().max()) + 1e-6, (value - second[name]).abs()
        assert float(apart.mean()) <= 1e-4 * largest, name
        assert float(apart.max()) <= 0.05 * largest, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_gpu_rank_matches_the_cpu(tmp_path, optimizer):
    setting = f"rows.optimizer={optimizer}"
    on_cpu, on_gpu = (
        train(tmp_path, device, 1, setting, steps=CLOSE_STEPS) for device in ("cpu", "cuda")
    )
    assert_close(on_cpu, on_gpu)


def test_two_nccl_ranks_on_one_gpu_match_one_rank(tmp_path):
    on_cpu = train(tmp_path, "cpu", steps=CLOSE_STEPS)
    assert_close(on_cpu, train(tmp_path, "cuda", 2, steps=CLOSE_STEPS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_on_a_gpu_are_identical(tmp_path, ranks):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (train(tmp_path / name, "cuda", ranks) for name in "ab")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_only_new_rows_and_nested_order_change_no_bit_on_a_gpu(tmp_path, micro_batches):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    split = f"pipeline.micro_batches={micro_batches}"
    serial = train(tmp_path / "a", "cuda", 1, split)
    nested = train(
        tmp_path / "b", "cuda", 1, split, "pipeline.plan=nested", "pipeline.retrieval=new"
    )
    for name, value in serial.items():
        assert torch.equal(value, nested[name]), name
