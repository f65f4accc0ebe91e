"""`nestpipe bench groups`: a run so small that only the shape of the answer counts."""

import json
import subprocess
import sys

import pytest

from nestpipe.bench.groups import GroupVariant, group_variants, timed_steps
from nestpipe.cli.app import main
from nestpipe.errors import ConfigError

TINY = (
    "ranks=2",
    "batch=4",
    "keys=3",
    "rows=100",
    "dim=4",
    "width=4",
    "micro_batches=2",
    "rounds=1",
)
SMALL = ["bench", "groups", *(part for size in TINY for part in ("--set", size))]


def run(capfd, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *arguments])
    return stop.value.code, capfd.readouterr()


def test_one_dimension_and_groups_are_timed_and_their_bytes_counted():
    command = [sys.executable, "-m", "nestpipe", *SMALL, "--intervals", "1,2", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]
    assert [reading["variant"]["groups"] for reading in found] == [1, 2, 2, 2]
    assert [reading["variant"]["merge_every"] for reading in found] == [1, 1, 1, 2]
    for reading in found:
        assert reading["step_ms"] > 0
        assert reading["sent_mb"] > 0
    # Averaging rows less often sends fewer of them.
    assert found[3]["sent_mb"] < found[2]["sent_mb"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--intervals", "1,x"], "intervals are '1,x'"),
        (["--intervals", "2,3"], "use such that divide the longest"),
        (["--groups", "3"], "groups is 3 and there are 2 ranks"),
    ],
)
def test_what_cannot_be_is_said(capfd, options, sentence):
    status, said = run(capfd, *options)
    assert status == 2
    assert sentence in " ".join(said.err.split())


def test_whole_intervals_are_on_the_clock():
    assert timed_steps(group_variants(2, [1, 4, 16])) == 16
    assert timed_steps(group_variants(2, [1])) == 16
    assert timed_steps(group_variants(2, [5])) == 20
    assert timed_steps([GroupVariant()]) == 16
    with pytest.raises(ConfigError, match="divide the longest"):
        timed_steps(group_variants(2, [4, 6]))
