"""The parts of `nestpipe bench relay` that need no service."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.bench import relay_run as relay
from nestpipe.bench.relay_run import ARMS, AskedSizes, choose, sections, turned
from nestpipe.bench.relay_service import (
    Compared,
    Kill,
    Reference,
    RelayReading,
    conclusion,
    is_sound,
    write_random,
)
from nestpipe.cli.app import main
from nestpipe.config import build
from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import Record, Run, report
from nestpipe.loadtest.run import RandomModel
from nestpipe.loadtest.settings import LoadSettings
from nestpipe.loadtest.workload import Visit
from nestpipe.serve.engine.admission import Costs, Fit, Work
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import Answer, History, PrefixItem, RankItem, RankPath, RankRequest

COSTS = Costs(
    {
        Work.INLINE: Fit(base=4, nn=4e-5),
        Work.PREFIX: Fit(nn=4e-5),
        Work.CACHED: Fit(base=10, n=0.01),
    }
)
"""2,048 events: 172 ms inline, of which the prefix is 157, and 30 with it."""


def chosen(**asked):
    return choose(COSTS, AskedSizes(**asked), candidates=16, short=64, instances=2)


def test_inline_misses_the_target_at_the_chosen_length_and_a_kept_prefix_does_not():
    sizes = chosen()
    assert (sizes.length, sizes.target_ms) == (1856, 100.0)
    assert 1.35 * sizes.target_ms < sizes.inline_ms <= 1.5 * sizes.target_ms
    assert sizes.cached_ms < 0.5 * sizes.target_ms
    assert sizes.cap < sizes.length
    assert sizes.capped_ms <= 0.5 * sizes.target_ms < COSTS.inline_ms(sizes.cap + 64, 16)
    assert sizes.rate * (sizes.prefix_ms + sizes.cached_ms) / 2e3 == pytest.approx(0.06, rel=0.01)


def test_the_target_follows_from_a_length_and_what_is_given_stays():
    assert chosen(length=3000).target_ms == pytest.approx(COSTS.inline_ms(3000, 16) / 1.5, abs=0.1)
    sizes = chosen(length=300, target_ms=7.0, rate=3.0)
    assert (sizes.length, sizes.target_ms, sizes.rate) == (300, 7.0, 3.0)
    with pytest.raises(ConfigError, match="512 events are ranked in 14 ms here"):
        chosen(length=512)


def test_what_is_chosen_makes_settings():
    settings = build(LoadSettings, sections(chosen(), seconds=5.0, candidates=16))
    workload, serve = settings.workload, settings.serve
    assert workload.retrieval_ms + workload.preprocess_ms == 300
    assert serve.window_ms > 300
    assert serve.max_events >= workload.most_length > workload.length == 1856


def test_every_arm_comes_first_in_turn():
    orders = [turned(ARMS, number) for number in range(4)]
    assert [order[0] for order in orders] == list(ARMS)
    assert all(set(order) == set(ARMS) for order in orders)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HstuRankModel:
    sizes = RandomModel(layers=2, dim=8, heads=2, items=40, max_len=64)
    folder = write_random(tmp_path_factory.mktemp("random"), sizes)
    return HstuRankModel.from_checkpoint(folder, "cpu")


def test_the_checkpoint_of_random_weights_is_the_random_model(model: HstuRankModel):
    sizes = RandomModel(layers=2, dim=8, heads=2, items=40, max_len=64)
    same = HstuRankModel.random(sizes.config, sizes.items, sizes.seed, "cpu")
    item = RankItem(History(np.arange(1, 30)), np.arange(1, 41))
    assert (model.full([item])[0] == same.full([item])[0]).all()


def test_an_answer_is_right_for_the_events_that_it_rests_on_and_no_others(model: HstuRankModel):
    ids = np.random.default_rng(0).integers(1, 41, 60)
    request = RankRequest("u", History(ids[:40]), History(ids[40:50]), ids[50:])
    past = model.prefix([PrefixItem(request.long)])[0]
    scores_C = model.rank([RankItem(request.short, request.candidates_C, past)])[0]
    answer = Answer(scores_C, RankPath.HBM_HIT, 50, model.version)
    cut = model.full([RankItem(History(ids[20:50]), request.candidates_C)])[0]
    reference = Reference(model)

    def wrong(answer: Answer) -> int:
        found = reference.compare((0, 0), request, answer)
        assert found.compared == 1
        return found.wrong

    assert wrong(answer) == 0
    assert wrong(replace(answer, scores_C=cut, length_used=30)) == 0
    assert wrong(replace(answer, scores_C=cut)) == 1
    assert wrong(replace(answer, scores_C=scores_C + 1e-4 * scores_C.std())) == 1
    assert wrong(replace(answer, scores_C=scores_C * np.nan)) == 1
    assert wrong(replace(answer, scores_C=scores_C[:-1])) == 1
    assert wrong(replace(answer, length_used=51)) == 1
    assert wrong(replace(answer, version="another")) == 1


def reading(arm: str, ms: float, *, front="builtin", lost=0, wrong=0, kill=None) -> RelayReading:
    visit = Visit(0, 0.0, 0.2, 0, long=1936, short=64, candidates=8)
    answer = Answer(np.zeros(8, np.float32), RankPath.HBM_HIT, 2000, "v")
    records = [Record(visit, answer=answer, latency_ms=ms) for _ in range(10)]
    records += [Record(visit) for _ in range(lost)]
    figures = report(arm, Run(records), target_ms=100.0, seconds=1.0, warmup_s=0.0)
    return RelayReading(front, figures, Compared(10, wrong), kill)


def four(**ms: float) -> list[RelayReading]:
    names = {"full": "inline full", "capped": "inline capped", "relay": "relay"}
    names["host"] = "relay + host"
    return [reading(names[name], value) for name, value in ms.items()]


KILLED = reading("instance killed", 90, kill=Kill("instance-0", 1, 2, True))


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            {"full": 180, "capped": 60, "relay": 70, "host": 65},
            "behind the built-in router relay and relay + host keep it where inline cannot "
            "(P99 65 ms, inline 180 ms)",
        ),
        (
            {"full": 180, "capped": 60, "relay": 120, "host": 65},
            "relay + host keeps it where inline cannot (P99 65 ms, inline 180 ms)",
        ),
        (
            {"full": 90, "capped": 60, "relay": 70, "host": 65},
            "relay and relay + host keep it, and so does inline ranking",
        ),
        (
            {"full": 180, "capped": 60, "relay": 130, "host": 120},
            "behind the built-in router relay misses it (P99 120 ms, inline 180 ms)",
        ),
    ],
)
def test_the_conclusion_says_what_was_seen(ms: dict[str, float], said: str):
    readings = [*four(**ms), KILLED]
    sentence = conclusion(readings, 2000)
    assert sentence.startswith("At 2,000 events and a P99 target of 100 ms, behind")
    assert said in sentence
    assert sentence.endswith(
        "with an instance killed under load 0 of 10 requests were lost; 0 of 50 answers had a "
        "wrong score."
    )
    assert is_sound(readings)


def test_a_target_kept_by_losing_requests_is_missed_and_the_reason_is_said():
    spoilt = [reading(name, 60, lost=1) for name in ("relay", "relay + host")]
    readings = [*four(full=180, capped=60), *spoilt, KILLED]
    said = "relay misses it (P99 60 ms, inline 180 ms, 9.1% cut, shed or lost)"
    assert said in conclusion(readings, 2000)


def test_a_lost_request_or_a_wrong_score_is_not_sound():
    good = four(full=180, capped=60, relay=70, host=65)
    lost = reading("instance killed", 90, lost=1, kill=Kill("instance-0", 1, 2, True))
    assert not is_sound([*good, lost])
    assert "1 of 11 requests were lost" in conclusion([*good, lost], 2000)
    wrong = reading("instance killed", 90, wrong=1, kill=Kill("instance-0", 1, 2, True))
    assert not is_sound([*good, wrong])
    assert "1 of 50 answers had a wrong score" in conclusion([*good, wrong], 2000)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--checkpoint", "a", "--random", "dim=8"], "both --checkpoint and --random"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--set", "serve.targe_ms=5"], "did you mean target_ms"),
        (["--checkpoint", "no/such/run"], "'no/such/run' is not a checkpoint"),
        (["--random", "layers"], "says nothing of a random model"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(capsys, wrong: list[str], sentence: str):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "relay", *wrong])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert sentence in said
    assert len(re.findall("\n", said)) == 1


TINY = ["--random", "layers=1,dim=8,heads=1,items=50,max_len=256", "--candidates", "8"]
TINY += ["--length", "128", "--target-ms", "100", "--rate", "5", "--seconds", "1", "--rounds", "2"]


def run(
    monkeypatch: pytest.MonkeyPatch, readings: list[RelayReading], *more: str
) -> int | str | None:
    """The command with a comparison that has ended already."""
    asked: list[relay.RelayCase] = []

    def compare(case: relay.RelayCase, *_: object) -> list[RelayReading]:
        asked.append(case)
        return readings

    monkeypatch.setattr(relay, "compare", compare)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "relay", *TINY, *more])
    (case,) = asked
    assert (case.rounds, case.fronts) == (2, ("builtin",))
    assert (case.settings.workload.length, case.settings.serve.target_ms) == (128, 100.0)
    return stop.value.code


def test_tables_the_sentence_and_json_tell_the_same(monkeypatch, capsys, tmp_path):
    readings = [*four(full=180, capped=60, relay=70, host=65), KILLED]
    assert run(monkeypatch, readings, "--json", str(tmp_path / "told.json")) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "told.json").read_text())
    assert report["conclusion"] == conclusion(readings, 128)
    assert report["conclusion"] in said
    assert [one["p99_ms"] for one in report["results"]] == [180, 60, 70, 65, 90]
    assert [one["keeps_target"] for one in report["results"]] == [False, True, True, True, True]
    assert report["results"][-1]["killed"]["in_hand"] == 1
    for one in readings:
        assert said.count(f"builtin: {one.report.name}  ") == 2  # a row in each table


def test_a_wrong_score_is_exit_status_1_and_a_missing_nginx_is_said(monkeypatch, capsys):
    monkeypatch.setattr(relay, "find_nginx", lambda: None)
    bad = reading("instance killed", 90, wrong=1, kill=Kill("instance-0", 1, None, True))
    readings = [*four(full=180, capped=60, relay=130, host=120), bad]
    assert run(monkeypatch, readings, "--nginx", "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    assert "nginx is skipped: there is none on this machine" in report["notes"][0]
    assert "relay misses it" in report["conclusion"]
