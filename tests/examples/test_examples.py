"""Every example runs as a user would run it, and prints what its text promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_S = 600
"""For a machine busy with other tests; on two idle cores each takes well under a minute."""


def run(name: str) -> str:
    """What an example prints; warnings are errors, so no example uses a deprecated name."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    under = torchrun if name == "04_two_ranks.py" else []
    done = subprocess.run(
        [sys.executable, *under, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def auc_in(printed: str) -> float:
    found = re.search(r"test AUC (\d\.\d+)", printed)
    assert found, printed
    return float(found[1])


@pytest.mark.parametrize(
    "name",
    [
        "01_one_rank.py",
        "02_your_model.py",
        "03_your_parquet.py",
        "04_two_ranks.py",
        "09_your_own_run.py",
    ],
)
def test_a_training_example_learns(name: str):
    assert auc_in(run(name)) > 0.65


def test_the_proof_tells_an_exact_plan_from_a_stale_one():
    printed = run("05_verify.py")
    assert "nested: identical" in printed
    assert "stale_prefetch: different" in printed


def test_the_simulated_cluster_gains_by_nesting():
    printed = run("06_simulate_your_cluster.py")
    steps = {
        line.split()[0]: int(line.split()[-2])
        for line in printed.splitlines()
        if line.startswith(("serial", "nested"))
    }
    assert steps["nested"] < steps["serial"], printed


def test_exact_groups_end_where_one_group_ends():
    auc = dict(re.findall(r"^(.*): test AUC (.*)$", run("07_groups.py"), re.MULTILINE))
    assert float(auc["two groups, exact"]) == pytest.approx(float(auc["one group"]), abs=1e-3)


def test_a_trained_ranker_answers_from_the_prefix_sent_early():
    printed = run("08_train_and_serve.py")
    assert "signal: {'outcome': 'admitted'}" in printed
    assert "'length_used': 42" in printed


def test_every_example_is_tested_and_named_in_the_readme():
    here, readme = Path(__file__).read_text(), (ROOT / "README.md").read_text()
    for file in EXAMPLES:
        assert f'"{file.name}"' in here, f"no test runs examples/{file.name}"
        assert f"examples/{file.name}" in readme, f"README.md does not name examples/{file.name}"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_import_what_users_may(file: Path):
    modules = re.findall(r"^(?:from|import) (nestpipe[\w.]*)", file.read_text(), re.MULTILINE)
    assert set(modules) <= {"nestpipe", "nestpipe.schedule", "nestpipe.sim"}
