"""The command line: what a person types, sees, and is told when it is wrong."""

import json
import subprocess
import sys

import pytest

from nestpipe.cli import simulate as simulation
from nestpipe.cli.app import main
from nestpipe.schedule import PLANS, PlanOptions, from_text, plan
from nestpipe.sim import Scale, costs, paper_cluster, paper_rows, replay
from nestpipe.trace import write_chrome


@pytest.fixture
def run(capsys):
    """Run a command; returns exit status, standard output and standard error."""

    def go(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        status = stop.value.code
        assert isinstance(status, int)
        return status, captured.out, captured.err

    return go


@pytest.fixture
def trace_file(tmp_path):
    serial = plan("serial", PlanOptions(micro_batches=2))
    at = costs(paper_cluster(), serial.shape, Scale(4))
    file = tmp_path / "measured.json"
    write_chrome(replay(serial, at, Scale(4), batches=16, record=range(4)).trace, file)
    return file


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_can_be_drawn_in_every_format(run, name, tmp_path):
    status, out, _ = run("draw", name, "--batches", 2, "--micro-batches", 2)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 100
    status, out, _ = run("draw", name, "--format", "svg")
    assert status == 0
    assert out.startswith("<svg")
    status, out, _ = run("draw", name, "--format", "trace")
    assert status == 0
    assert json.loads(out)["traceEvents"]
    file = tmp_path / "s.txt"
    assert run("draw", name, "--format", "schedule", "-o", file)[0] == 0
    assert from_text(file.read_text()).shape.plan == name
    assert run("draw", file)[0] == 0


def test_a_measured_trace_is_drawn_like_a_plan(run, trace_file):
    status, out, _ = run("draw", trace_file)
    assert status == 0
    assert "compute" in out
    assert run("draw", trace_file, "--format", "svg")[1].startswith("<svg")


def test_help_has_an_example_for_every_command(run):
    for command in (["draw"], ["check"], ["simulate"], ["simulate", "paper"]):
        status, out, _ = run(*command, "--help")
        assert status == 0
        assert "Example: nestpipe" in " ".join(out.split())


def test_without_arguments_there_is_help_and_a_version(run):
    assert "draw" in run()[1]
    assert run("--version")[1].startswith("nestpipe ")


def test_check_says_exact_or_refuses_with_the_marked_grid(run, tmp_path):
    status, out, _ = run("check", "nested", "--micro-batches", 4, "--retrieval", "new")
    assert status == 0
    assert out.startswith("nested is exact")
    status, out, _ = run("check", "stale_prefetch")
    assert status == 1
    assert out.startswith("refused: plan stale_prefetch is stale")
    assert run("check", "stale_prefetch", "--stale", "stale_prefetch")[0] == 0
    file = tmp_path / "mine.txt"
    run("draw", "dual_buffer", "--format", "schedule", "-o", file)
    file.write_text(file.read_text().replace("sync 1 after retrieve 1, update 0", "sync 1"))
    status, out, _ = run("check", file)
    assert status == 1
    assert "wait for" in out.splitlines()[0]
    assert "^^^" in out
    status, out, _ = run("check", file, "--json", "-")
    assert status == 1
    assert json.loads(out)["violations"][0]["missing"]


def test_simulate_prints_only_json_when_asked(run, monkeypatch):
    status, out, _ = run("simulate", "--workers", "1,64", "--json", "-", "--batches", 16)
    assert status == 0
    points = json.loads(out)["points"]
    assert [point["workers"] for point in points] == [1, 64]
    # The whole table is in test_simulate.py; one scale prints no more and no less.
    monkeypatch.setattr(simulation, "paper_rows", lambda progress: paper_rows((1536,)))
    monkeypatch.setattr(simulation, "paper_choices", lambda progress: [])
    status, out, _ = run("simulate", "paper", "--json", "-")
    assert status == 0
    assert len(json.loads(out)["rows"]) == 7


def test_simulate_shows_a_table_and_writes_its_files(run, tmp_path):
    files = {name: tmp_path / name for name in ("a.json", "a.svg", "a.trace.json", "hw.toml")}
    status, out, _ = run(
        *("simulate", "--workers", "8,1536", "--plan", "dual_buffer", "--groups", 2),
        *("--json", files["a.json"], "--svg", files["a.svg"], "--trace", files["a.trace.json"]),
    )
    assert status == 0
    assert "1,536" in out
    assert json.loads(files["a.json"].read_text())["points"][1]["groups"] == 2
    assert files["a.svg"].read_text().startswith("<svg")
    assert run("draw", files["a.trace.json"])[0] == 0
    files["hw.toml"].write_text(run("simulate", "--print-hardware")[1])
    again = run("simulate", "--hardware", files["hw.toml"], "--workers", 64)
    assert again == run("simulate", "--workers", 64)


def test_settings_override_the_hardware(run):
    def step(*more: str) -> float:
        out = run("simulate", "--workers", "1536", "--json", "-", *more)[1]
        return json.loads(out)["points"][0]["step_ms"]

    assert step("--set", "network.gb_per_s=1.0") > step()
    assert step("--set", "stragglers.jitter=0.1") > step()


def test_costs_can_come_from_a_trace(run, trace_file):
    status, out, _ = run(
        "simulate", "--from-trace", trace_file, "--workers", "4,8", "--micro-batches", 2
    )
    assert status == 0
    words = " ".join(out.split())
    assert "fitted to a run of 4 workers" in words
    assert "taken to cost nothing: sync" in words, "kinds that the plan has, and no others"
    assert "follow the hardware description" in words
    out = run("simulate", "--from-trace", trace_file, "--workers", "4", "--json", "-")[1]
    assert json.loads(out)["fitted"]["per_micro_ms"]["dense"]["shared"] > 0


def broken_files(folder):
    (folder / "garbage.txt").write_bytes(b"\xff\xfe\x00garbage")
    (folder / "schedule.txt").write_text("schedule nested\nrows one\n")
    (folder / "hardware.toml").write_text("[network]\ngb_per_s = 'fast'\n")
    (folder / "not.toml").write_text("[network\n")
    (folder / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    return folder


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["draw", "nestd"], "unknown plan 'nestd'"),
        (["draw", "nested", "--micro-batches", "0"], "micro_batches is 0; use 1 to 1024"),
        (["draw", "nested", "--micro-batches", "many"], "--micro-batches"),
        (["draw", "nested", "--batches", "0"], "cannot plan 0 batches"),
        (["draw", "nested", "--batches", "1000000"], "1000000 batches"),
        (["draw", "nested", "--stages", "5"], "stages is 5; use 1 to 4"),
        (["draw", "nested", "--format", "jpeg"], "jpeg"),
        (["draw", "nested", "--width", "3"], "3 columns"),
        (["draw", "nested", "-o", "FOLDER"], "cannot write"),
        (["draw", "stale_prefetch", "--retrieval", "new"], "stale_prefetch"),
        (["draw"], "Missing argument"),
        (["draw", "FOLDER"], "is a folder"),
        (["draw", "FOLDER/missing.txt"], "there is no file"),
        (["draw", "FOLDER/garbage.txt"], "not a text file"),
        (["draw", "FOLDER/schedule.txt"], "line 2: 'rows one' is not an op"),
        (["check", "FOLDER/schedule.txt"], "line 2: 'rows one' is not an op"),
        (["simulate", "--plan", "best"], "unknown plan 'best'"),
        (["simulate", "--micro-batches", "0"], "micro_batches is 0; use 1 to 1024"),
        (["simulate", "--workers", "8,many"], "workers cannot be 'many'"),
        (["simulate", "--workers", "0"], "workers cannot be '0'"),
        (["simulate", "--workers", "9", "--groups", "2"], "9 workers cannot form 2 equal groups"),
        (["simulate", "--batches", "1"], "1 batches"),
        (["simulate", "--hardware", "FOLDER/none.toml"], "there is no file"),
        (["simulate", "--hardware", "FOLDER/not.toml"], "not.toml"),
        (["simulate", "--hardware", "FOLDER/hardware.toml"], "gb_per_s"),
        (["simulate", "--set", "network.gb=3"], "unknown key network.'gb'"),
        (["simulate", "--set", "nonsense"], "nonsense"),
        (["simulate", "--from-trace", "FOLDER/trace.json"], "trace.json"),
        (["simulate", "--from-trace", "FOLDER/garbage.txt"], "garbage.txt"),
        (["teleport"], "teleport"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(run, tmp_path, arguments, expected):
    folder = broken_files(tmp_path)
    arguments = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert expected in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m nestpipe.cli.app draw nested --batches 300 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("time")
