"""`nestpipe load`: what it prints, writes and refuses. Nothing here depends on how fast it runs."""

import json
from concurrent.futures import Future
from typing import ClassVar

import numpy as np
import pytest

from nestpipe.cli.app import main
from nestpipe.cli.options import console
from nestpipe.cli.serve import found_table, invalid_lines, results_table, step_line
from nestpipe.errors import RunError
from nestpipe.loadtest.driver import FormulaService, VirtualTime, drive, report
from nestpipe.loadtest.run import Found, SearchStep
from nestpipe.loadtest.settings import LoadSettings, WorkloadSettings
from nestpipe.loadtest.workload import legs, visits
from nestpipe.serve.engine.admission import Costs, Fit, Work
from nestpipe.serve.types import Answer, RankPath

TINY = (
    *("--random", "layers=1,dim=8,heads=1,items=20", "--rate", "40", "--seconds", "0.5"),
    *("--length", "24", "--candidates", "4", "--set", "workload.short=4", "--threads", "1"),
    *("--target-ms", "60000", "--set", "workload.retrieval_ms=5", "--device", "cpu"),
)
"""Any machine sends these in time: a tenth of the target is six seconds."""


@pytest.fixture
def run(capsys):
    """Run the program as its console script does; returns exit status, stdout and stderr."""

    def go(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["load", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return go


def words(text: str) -> str:
    return " ".join(text.split())


def test_arms_meet_the_same_requests(run):
    status, out, _ = run(*TINY, "--arms", "A,D", "--set", "serve.cut_length=16", "--json", "-")
    assert status == 0
    said = json.loads(out)
    capped, relay = said["results"]
    assert capped["requests"] == relay["requests"] > 5
    assert (capped["name"], relay["name"]) == ("A inline capped", "D relay + host")
    assert capped["cuts"] == capped["requests"]
    assert capped["compliant"] == 0
    assert relay["compliant"] == relay["requests"]
    assert relay["asked"] == capped["asked"]
    assert capped["used"]["mean"] == 16
    assert said["settings"]["workload"]["short"] == 4


def test_tables_and_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    picture = tmp_path / "a.svg"
    status, out, _ = run(*TINY, "--arms", "B", "--plot", picture)
    assert status == 0
    assert "B inline full" in out
    assert "of prefixes asked for again" in words(out)
    assert "miss full" in words(out)
    assert picture.read_text().startswith("<?xml")


def test_a_search_prints_every_step(run):
    status, out, _ = run(
        *(*TINY, "--arms", "B", "--find", "length", "--length", 64, "--seeds", 1),
        *("--set", "workload.most_length=192"),
    )
    assert status == 0
    assert "B inline full: length 64: kept (P99" in out
    assert "B inline full: length 128: kept" in out
    assert "192 or more" in out


@pytest.mark.parametrize(
    ("tolerance", "tried"),
    # Up to 799 events keep the target.
    [(1, [512, 1024]), (0.5, [512, 1024, 704]), (0.05, [512, 1024, 704, 832, 768])],
)
def test_the_tolerance_says_when_a_search_ends(run, monkeypatch, tolerance, tried):
    import nestpipe.loadtest.run as runs

    def run_arm(arm, bench, advance):
        return virtual_report(10 if bench.settings.workload.length < 800 else 100), None

    monkeypatch.setattr(runs, "run_arm", run_arm)
    status, out, _ = run(
        *(*TINY, "--arms", "B", "--find", "length", "--length", 512, "--seeds", 1),
        *("--tolerance", tolerance, "--json", "-"),
    )
    assert status == 0
    said = json.loads(out)
    assert said["tolerance"] == tolerance
    assert [step["value"] for step in said["results"][0]["steps"]] == tried


def test_a_log_is_written_and_advised_on(run, tmp_path):
    log, costs = tmp_path / "log.csv", tmp_path / "costs.json"
    status, out, _ = run("--write-log", log, "--rate", 20, "--seconds", 30, "--length", 2048)
    assert status == 0
    assert "wrote" in out
    fits = {
        Work.INLINE: Fit(n=0.05),
        Work.PREFIX: Fit(n=0.01),
        Work.CACHED: Fit(base=5),
        Work.RELOAD: Fit(n=1e-7),
    }
    held = json.loads(Costs(fits).to_json())
    costs.write_text(json.dumps({**held, "kv_bytes_per_event": 4096}))
    status, out, _ = run("--advise", log, "--costs", costs, "--target-ms", 50)
    assert status == 0
    assert "- Relay pays: 100.0% of requests would miss the target of 50 ms" in words(out)
    assert "Settings for each instance: target_ms = 50, relay = true" in words(out)
    status, out, _ = run("--advise", log, "--costs", costs, "--json", "-")
    assert json.loads(out)["relay"] is True


def test_measured_costs_are_written_and_read_back(run, tmp_path):
    log, costs = tmp_path / "log.jsonl", tmp_path / "costs.json"
    run(*TINY, "--write-log", log)
    status, out, _ = run(*TINY, "--write-costs", costs)
    assert status == 0
    assert json.loads(costs.read_text())["kv_bytes_per_event"] == 1 * 8 * 2 * 4
    status, out, _ = run(*TINY, "--advise", log, "--costs", costs)
    assert status == 0
    assert "Relay does not pay" in out


class FakeClient:
    """A service elsewhere that answers at once, and loses all signals."""

    made: ClassVar[list["FakeClient"]] = []

    def __init__(self, url, token=None, *, threads):
        self.url, self.token, self.threads, self.rankings = url, token, threads, 0
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def health(self):
        return {"ready": True}

    def stats(self):
        return {"rankings": float(self.rankings)}

    def prefetch(self, signal):
        raise RunError("lost")

    def rank(self, request):
        self.rankings += 1
        answer = Future()
        length = len(request.long) + len(request.short)
        answer.set_result(Answer(np.zeros(4, np.float32), RankPath.MISS_FULL, length, "v"))
        return answer


def test_a_service_elsewhere_is_loaded_as_it_is(run, monkeypatch, tmp_path):
    pytest.importorskip("httpx", reason="httpx is an extra")
    monkeypatch.setattr("nestpipe.serve.http.client.Client", FakeClient)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    status, out, _ = run(
        *("--url", "http://there", "--token-file", token, "--rate", 40, "--seconds", 0.5),
        *("--length", 128, "--target-ms", 60_000, "--json", "-"),
    )
    assert status == 0
    (told,) = json.loads(out)["results"]
    assert told["name"] == "service"
    assert told["compliant"] == told["requests"] > 5
    assert told["outcomes"] == {"lost": told["requests"]}
    assert told["counted"] == {"rankings": FakeClient.made[-1].rankings}
    assert FakeClient.made[-1].token == "0123456789abcdef"
    assert FakeClient.made[-1].closed
    assert FakeClient.made[-1].url == "http://there"


def virtual_report(ms: float, target_ms: float = 50):
    settings = WorkloadSettings(rate=20, seconds=2, length=128)
    service = FormulaService(time=VirtualTime(), full_ms=lambda length: ms)
    driven = drive(service, list(legs(settings, visits(settings))), service.time)
    for record in driven.records:
        record.late_ms = 0.1 * ms
    return report("B inline full", driven, target_ms=target_ms, seconds=2, warmup_s=0)


def printed(thing, capsys) -> str:
    console().print(thing)
    return words(capsys.readouterr().out)


def test_a_late_driver_is_said_aloud(capsys):
    fine, late = virtual_report(10), virtual_report(100)
    (line,) = invalid_lines([fine, late])
    assert line.startswith("NOT VALID: in arm B inline full the driver was 10.0 ms late at P99")
    settings = LoadSettings()
    assert "100.0%" in printed(results_table([fine], settings, 0.5), capsys)


def test_a_late_driver_ends_with_status_1(run, monkeypatch):
    import nestpipe.loadtest.driver as told

    monkeypatch.setattr(told, "LATE_SHARE", -1.0)
    status, out, _ = run(*TINY, "--arms", "B")
    assert status == 1
    assert "NOT VALID" in out


def test_what_was_found_is_compared_with_the_first_arm(capsys):
    step = SearchStep(512, (virtual_report(10),), True)
    found = {
        "B": Found(512, True, (step,)),
        "D": Found(1024, False, ()),
        "A": Found(None, True, ()),
    }
    text = printed(found_table("length", found, LoadSettings()), capsys)
    assert "B 512 1.00 1" in text
    assert "D 1024 or more 2.00 0" in text
    assert "A none - 0" in text
    assert step_line("B", "length", step).startswith("B: length 512: kept (P99 ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--arms", "Z"], "there is no arm 'Z'"),
        (["--rate", "0"], "rate is 0"),
        (["--find", "rate", "--tolerance", "0"], "tolerance is 0; give a number above 0"),
        (["--find", "rate", "--tolerance", "1.5"], "tolerance is 1.5; give a number above 0"),
        (["--length", "10"], "length is 10 and its newest 64 events"),
        (["--set", "workload.user=3"], "did you mean users"),
        (["--set", "host_mb=3"], "unknown key 'host_mb'"),
        (["--random", "dim=7,heads=2"], "dim is 7 and heads 2"),
        (["--random", "dim=8", "--checkpoint", "x"], "both --checkpoint and --random"),
        (["--url", "http://127.0.0.1:9", "--arms", "A"], "leave out --arms A"),
        (["--url", "http://127.0.0.1:9", "--random", "dim=8"], "a model of its own"),
        (["--checkpoint", "nowhere"], "'nowhere' is not a checkpoint"),
        (["--advise", "none.csv"], "there is no file 'none.csv'"),
        (["--plot", "a.txt"], "cannot draw 'a.txt'"),
        (["--write-log", "a.txt"], "names no kind of log"),
    ],
)
def test_wrong_input_is_one_sentence(run, arguments, sentence):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_costs_without_memory_are_refused(run, tmp_path):
    costs, log = tmp_path / "costs.json", tmp_path / "log.csv"
    costs.write_text("{}")
    run("--write-log", log, "--seconds", 1)
    status, _, err = run("--advise", log, "--costs", costs)
    assert status == 2
    assert "holds no costs with kv_bytes_per_event" in err
