"""`nestpipe verify` from the outside."""

import json
import os
import subprocess
import sys

import pytest

from nestpipe.cli.app import main
from nestpipe.embedding.pool import RowPool

SMALL = (
    *("--set", "data.synthetic.samples=1000"),
    *("--set", "data.synthetic.num_tables=3"),
    *("--set", "data.synthetic.num_keys=300"),
    *("--set", "run.batch=64"),
    *("--set", "run.device=cpu"),
    *("--set", "model.dim=4"),
    *("--set", "pipeline.micro_batches=2"),
    *("--steps", "6"),
)


@pytest.fixture
def verify(capsys):
    """Exit status, standard output and standard error of the command, in this process."""

    def call(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["verify", *SMALL, *arguments])
        return stop.value.code, *capsys.readouterr()

    return call


def on_two_ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return on_ranks(2, *arguments)


def on_ranks(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nestpipe", "verify", *SMALL, *arguments]
    command += ["--ranks", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def test_two_processes_are_identical_and_say_so_in_json(tmp_path):
    done = on_two_ranks("--json", str(tmp_path / "verdict.json"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "identical: nested and serial, 6 steps of 2 micro-batches on 2 ranks"
    assert second.startswith("compared bit for bit: ")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict.pop("rows_compared") > 100
    assert verdict.pop("tensors_compared") > 20
    assert verdict == {
        "identical": True,
        "plan": "nested",
        "ranks": 2,
        "steps": 6,
        "micro_batches": 2,
        "rows_different": 0,
        "tensors_different": 0,
        "largest_difference": 0.0,
        "first_different_step": None,
        "first_difference": None,
    }


def test_two_processes_are_identical_where_rows_travel_in_bfloat16():
    more = ("--set", "pipeline.comm_dtype=bfloat16", "--set", "pipeline.exchange=window")
    done = on_two_ranks(*more, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] is True


POOLED = ("--set", "pipeline.retrieval=pooled")


@pytest.mark.parametrize("plan", ["nested", "dual_buffer", "serial"])
def test_rows_that_leave_a_small_pool_change_no_bit(verify, plan, monkeypatch):
    """The pool has two rows more than two batches use at most."""
    written: list[int] = []
    write = RowPool.writeback

    def counted(pool: RowPool, batch: int) -> int:
        written.append(write(pool, batch))
        return written[-1]

    monkeypatch.setattr(RowPool, "writeback", counted)
    more = ("--set", "run.device_memory=19.15KB", "--plan", plan, "--delays", "2")
    status, out, err = verify(*POOLED, *more, "--json", "-")
    assert status == 0, err
    assert json.loads(out)["identical"] is True
    assert sum(written) > 20, "rows leave"


def test_two_processes_are_identical_where_rows_leave_a_small_pool():
    done = on_two_ranks(*POOLED, "--set", "run.device_memory=12KB", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] is True


def test_a_pool_too_small_for_two_batches_is_one_sentence(verify):
    status, out, err = verify(*POOLED, "--set", "run.device_memory=12KB")
    assert (status, out) == (2, "")
    assert err.startswith("error: the pool of 129 rows (11.7 KB) is too small: batches 0 and 1 ")
    assert err.endswith(" more; raise device_memory, or make batches smaller\n")


def test_two_processes_with_too_small_a_pool_say_so_once():
    done = on_two_ranks(*POOLED, "--set", "run.device_memory=3KB")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: the pool of 30 rows") == 1, done.stderr


def test_two_processes_catch_a_stale_plan_with_exit_status_1():
    done = on_two_ranks("--plan", "stale_prefetch", "--json", "-")
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["identical"] is False
    assert verdict["first_difference"].startswith("on rank 0, table 'c0', key ")


def test_one_process_tells_people_how_much_differs(verify):
    status, out, _ = verify("--plan", "stale_prefetch")
    assert status == 1
    different, _, first, extent = out.splitlines()
    assert different.startswith("different: stale_prefetch is not serial, 6 steps of ")
    assert first.startswith("first difference: on rank 0, table 'c0', key ")
    assert " tensors differ, by at most " in extent
    assert extent.endswith("losses differ from step 2 on")


def test_delays_change_no_bit(verify):
    status, out, err = verify("--delays", "3")
    assert status == 0, err
    assert out.startswith("identical: nested and serial, 6 steps of 2 micro-batches on 1 rank")


def test_delays_are_for_plans(verify):
    status, _, err = verify("--delays", "3", "--one-dimension")
    assert status == 2
    assert err.startswith("error: --delays is 3 with --one-dimension; ")


@pytest.mark.parametrize("seed", ["x", "-1", "1.5"])
def test_delays_take_a_seed(verify, seed):
    status, _, err = verify("--delays", seed)
    assert status == 2
    assert err == f"error: --delays is {seed!r}; give a seed, a whole number from 0\n"


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ([], "nested"),
        (["--set", "pipeline.plan=dual_buffer"], "dual_buffer"),
        (["--set", "pipeline.plan=dual_buffer", "--plan", "frozen_window"], "frozen_window"),
        (["--plan", "serial"], "serial"),
    ],
)
def test_the_plan_is_the_one_asked_for_or_the_configs_or_nested(verify, arguments, plan):
    status, out, _ = verify(*arguments, "--json", "-")
    assert status == 0
    verdict = json.loads(out)
    assert verdict["identical"] is True
    assert verdict["plan"] == plan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--plan", "hasty"], "pipeline.plan is 'hasty'"),
        (["--steps", "0"], "--steps"),
        (["--ranks", "0"], "cannot start 0 ranks"),
        (["--set", "pipeline.micro_batch=3"], "did you mean micro_batches?"),
        (["--set", "pipeline.comm_dtype=float16"], "pipeline.comm_dtype is 'float16'"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(verify, arguments, expected):
    status, out, errors = verify(*arguments)
    assert status == 2
    assert out == ""
    assert errors.startswith("error: ")
    assert expected in errors
    assert errors.count("\n") == 1


def test_a_run_that_fails_is_no_verdict(verify):
    status, out, errors = verify("--set", "rows.lr=1e30", "--set", "rows.optimizer=sgd")
    assert status == 3
    assert out == ""
    assert "the loss of step" in errors


def test_four_processes_in_two_exact_groups_are_one_dimension_but_for_rounding():
    done = on_ranks(4, "--set", "parallel.groups=2", "--one-dimension", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("rows_compared") > 100
    assert found.pop("tensors_compared") > 5
    assert 0 < found.pop("largest_difference") <= found["bound"]
    assert found == {
        "agrees": True,
        "groups": 2,
        "ranks": 4,
        "steps": 6,
        "rows_missing": 0,
        "replicas_identical": True,
        "bound": 1e-5,
    }


def test_one_dimension_is_no_reference_for_itself_or_for_averaged_groups(verify):
    for more in ([], ["--set", "parallel.groups=2", "--set", "parallel.merge=averaged"]):
        status, out, err = verify("--one-dimension", *more)
        assert status == 2
        assert not out
        assert "only several exact groups equal one dimension" in err


def test_nor_where_rows_travel_in_bfloat16(verify):
    more = ("--set", "parallel.groups=2", "--set", "pipeline.comm_dtype=bfloat16")
    status, out, err = verify("--one-dimension", *more)
    assert status == 2
    assert not out
    assert "comm_dtype is 'bfloat16'" in err
    assert "set pipeline.comm_dtype=float32" in err
