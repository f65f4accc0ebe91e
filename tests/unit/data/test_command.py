"""`nestpipe data`: what a person sees."""

import builtins
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.cli.app import main


@pytest.fixture
def run(capsys):
    """Run a command; returns exit status, standard output and standard error."""

    def go(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["data", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return go


def test_help_has_an_example(run):
    for command in ("describe", "synth"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert f"Example: nestpipe data {command}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("made", "kind", "rows"),
    [
        ("parquet", "parquet", 48),
        ("movielens ratings", "movielens", 77),
        ("kuairand csv", "kuairand", 50),
        ("kuairand parquet", "kuairand", 50),
        ("criteo", "criteo", 50),
        ("criteo gz", "criteo", 50),
    ],
)
def test_formats_are_told_apart(run, make, made, kind, rows):
    path = make(made).path
    status, out, _ = run("describe", path, "--json", "-")
    assert status == 0
    found = json.loads(out)
    assert found["kind"] == kind
    assert found["tables"][0]["rows"] == rows
    assert found["broken"] == {"count": 0, "first": []}
    status, out, _ = run("describe", path)
    assert status == 0
    assert f"{rows} rows" in out
    assert max(map(len, out.splitlines())) <= 100


def test_columns_have_ranges_and_times(run, make):
    _, out, _ = run("describe", make("movielens ratings").path, "--json", "-")
    table = json.loads(out)["tables"][0]
    user = table["columns"][0]
    assert (user["name"], user["min"], user["max"], user["distinct"]) == ("userId", 0, 19, 20)
    assert user["distinct_exact"]
    assert table["time_range"][0].startswith("1970-01-01 00:00:0")


def test_many_distinct_values_are_counted_roughly():
    from nestpipe.data.describe import Distinct
    from nestpipe.data.order import draw

    for true in (100, 16_000, 200_000):
        distinct = Distinct()
        for piece in np.array_split(np.tile(np.arange(true), 3), 7):
            distinct.add(draw(0, piece))
        assert distinct.exact == (true < 16_384)
        assert distinct.count == pytest.approx(true, rel=0.03 if true > 16_384 else 0)


def test_broken_rows_are_told(run, tmp_path):
    (tmp_path / "ratings.dat").write_text("1::2::3::4\nBad line\n1::2::3::4\n")
    status, out, _ = run("describe", tmp_path)
    assert status == 0
    assert "1 broken rows skipped" in out
    assert ":2 (it has 1" in " ".join(out.split())
    status, _, err = run("describe", tmp_path, "--max-broken", 0)
    assert status == 2
    assert err.count("\n") == 1


def test_columns_of_any_type_are_described(run, tmp_path):
    columns = {
        "bytes": pa.array([b"\xff", b"a"]),
        "half": pa.array(np.array([1, 2], np.float16)),
        "pause": pa.array([3, 4], pa.duration("s")),
        "view": pa.array(["a", None], pa.string_view()),
        "text": pa.array([b"\xff", b"a"]).view(pa.string()),
        "lists": pa.array([[b"\xff"], None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns | {"half": ["x", "y"]}), tmp_path / "b.parquet")
    status, out, _ = run("describe", tmp_path, "--json", "-")
    assert status == 0
    one, other = (table["columns"] for table in json.loads(out)["tables"])
    assert [(found["min"], found["max"], found["empty"]) for found in one] == [
        (None, None, 0), (1.0, 2.0, 0), (3, 4, 0), (None, None, 1), ("a", "\ufffd", 0),
        (None, None, 1),
    ]  # fmt: skip
    assert (other[1]["min"], other[1]["max"]) == ("x", "y")


def test_what_cannot_be_described_is_one_sentence(run, tmp_path):
    for arguments in (("describe", tmp_path / "none"), ("describe", tmp_path)):
        status, _, err = run(*arguments)
        assert status == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_synth_writes_what_describe_reads(run, tmp_path):
    folder = tmp_path / "users"
    arguments = ("synth", folder, "--samples", 300, "--kind", "sequence", "--files", 2)
    status, out, _ = run(*arguments)
    assert status == 0
    assert out.startswith("wrote 300 samples")
    assert "300 rows in 2 files" in run("describe", folder)[1]
    status, _, err = run(*arguments)
    assert status == 2
    assert "--force" in err
    assert run(*arguments, "--force")[0] == 0
    assert "cannot fill" in run("synth", folder, "--samples", 1, "--files", 2)[2]
    assert "samples is 0" in run("synth", folder, "--samples", 0)[2]


@pytest.mark.parametrize("missing", ["torch", "pyarrow"])
def test_without_its_extra_the_command_names_it(run, tmp_path, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("nestpipe.data")]:
        monkeypatch.delitem(sys.modules, name)
    if missing == "torch":
        for name in ("nestpipe.batch", "nestpipe.batch"):
            monkeypatch.delitem(sys.modules, name, raising=False)
    real = builtins.__import__

    def refuse(name, *rest):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    status, _, err = run("describe", tmp_path)
    assert status == 2
    assert f"needs {missing}" in err
    assert "pip install 'nestpipe[train]'" in err


@pytest.mark.parametrize(("form", "ranks"), [("clicks", 1), ("sequences", 2)])
def test_bench_data_reads_beside_a_scan(capsys, form, ranks):
    options = ["--samples", "300", "--rounds", "1", "--batch", "32", "--json", "-"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "data", "--form", form, "--ranks", str(ranks), *options])
    assert stop.value.code == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["form"] == form
    assert found["ratio"] == pytest.approx(found["batches"] / found["scan"])
    assert found["batches"] > 0
