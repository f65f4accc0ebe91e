"""The adviser, with costs that are formulas: what it says can be computed by hand."""

from dataclasses import replace

import pytest

from nestpipe.errors import NestpipeError
from nestpipe.loadtest.advise import (
    Logged,
    Question,
    advise,
    log_of,
    read_log,
    sentences,
    write_log,
)
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.loadtest.workload import visits
from nestpipe.serve.engine.admission import Costs, Fit, Work
from nestpipe.serve.types import ServeSettings

KB = 1024
COSTS = Costs(
    {
        Work.INLINE: Fit(n=0.05),  # 50 ms at 1000 events
        Work.PREFIX: Fit(n=0.04),
        Work.CACHED: Fit(base=2, n=0.005),
        Work.RELOAD: Fit(n=1e-6),  # 1 ms per MB
    }
)
QUESTION = Question(
    costs=COSTS, kv_bytes=lambda length: length * KB, settings=ServeSettings(), grow_by=64
)


def log(*requests: tuple[float, str, int]) -> list[Logged]:
    return [Logged(time, user, length, 128) for time, user, length in requests]


def strangers(length: int, count: int = 50, gap: float = 1.0) -> list[Logged]:
    return log(*((i * gap, f"u{i}", length) for i in range(count)))


def returning(length: int, count: int = 50, gap: float = 1.0) -> list[Logged]:
    return log(*((i * gap, f"u{i % 2}", length) for i in range(count)))


def words(requests, question=QUESTION) -> tuple[str, ...]:
    advice = advise(requests, question)
    return tuple(sentences(advice, question))


def test_short_histories_need_no_relay():
    advice = advise(strangers(200), QUESTION)
    assert not advice.relay
    assert not advice.host
    assert advice.facts.misses == advice.facts.at_risk == 0
    assert advice.facts.inline_p99_ms == pytest.approx(10)
    assert advice.settings["relay"] == 0
    said = words(strangers(200))
    assert any(s.startswith("Relay does not pay: inline rankings take 10.0 ms") for s in said)
    assert any(s.startswith("Host memory does not pay: 0%") for s in said)


def test_long_histories_of_strangers_need_relay_but_no_host_memory():
    advice = advise(strangers(1600), QUESTION)
    assert advice.relay
    assert not advice.host
    assert advice.facts.misses == advice.facts.at_risk == 1
    # 1 request a second: 80 ms inline, or 1536 * 0.04 + 2 + 1536 * 0.005 with a prefix of 1536.
    assert advice.facts.inline_load == pytest.approx(0.080)
    assert advice.facts.relay_load == pytest.approx(0.06144 + 0.00968)
    assert advice.host_gain == pytest.approx(1.0)
    # 45 ms are allowed, so 900 events rank inline.
    assert advice.settings["cut_length"] == 900
    assert advice.settings["host_mb"] == 0
    # One prefix of 1.5 MB a second lives half a second; four of the largest is more.
    assert advice.settings["device_mb"] == 6
    said = words(strangers(1600))
    assert any(s.startswith("Relay pays: 100.0% of requests would miss") for s in said)


def test_device_memory_follows_from_littles_law():
    advice = advise(strangers(1600, gap=0.08), QUESTION)
    # 12.5 prefixes of 1.5 MB a second (50 of them in 49 gaps), half a second each, twice that.
    assert advice.settings["device_mb"] == -(-2 * 50 / (49 * 0.08) * 1.5 * 0.5 // 1)


def test_users_who_return_make_host_memory_pay():
    advice = advise(returning(1600), QUESTION)
    assert advice.relay
    assert advice.host
    assert advice.chosen.ttl_s == 10
    assert advice.chosen.reused == pytest.approx(48 / 50)
    assert advice.settings["host_ttl_s"] == 10
    # Two prefixes of 1.5 MB.
    assert advice.settings["host_mb"] == 3
    two_legs, reload = 0.06144 + 0.00968, 1536 * KB * 1e-9 + 0.00968
    assert advice.facts.host_load == pytest.approx((2 * two_legs + 48 * reload) / 50)
    assert advice.host_gain == pytest.approx(two_legs * 50 / (2 * two_legs + 48 * reload))
    assert any("Host memory pays: 96% of requests" in s for s in words(returning(1600)))


def test_returning_users_with_short_histories_may_want_host_memory_without_relay():
    advice = advise(returning(832), QUESTION)  # 41.6 ms inline: within the target
    assert not advice.relay
    assert advice.host
    assert any(s.startswith("Host memory pays even without relay") for s in words(returning(832)))


def test_the_trigger_also_prepares_what_comes_close_to_the_target():
    # 45 ms are in time and admission control prepares from 40 ms on: 2 of 3 prefixes are computed.
    mixed = log((0, "a", 1600), (1, "b", 832), (2, "c", 200))
    facts = advise(mixed, QUESTION).facts
    assert facts.misses == facts.helped == pytest.approx(1 / 3)
    assert facts.at_risk == pytest.approx(2 / 3)
    long, close, inline = 1536 * 0.045 + 2, 768 * 0.045 + 2, 200 * 0.05
    assert facts.relay_load == pytest.approx((long + close + inline) / 3 / 1e3)


def test_only_prefixes_that_relay_made_are_kept():
    mixed = log(
        *((i, f"short{i % 2}", 200) for i in range(40)),
        *((40 + i, f"long{i}", 1600) for i in range(5)),
    )
    advice = advise(mixed, QUESTION)
    assert advice.relay
    assert advice.memory[-1].seen == pytest.approx(38 / 45)
    assert advice.memory[-1].reused == 0
    assert not advice.host


def test_a_prefix_that_takes_longer_than_the_window_does_not_help():
    advice = advise(strangers(4096), QUESTION)  # 160 ms of prefix in a window of 100 ms
    assert not advice.relay
    assert advice.facts.too_late == 1
    assert any("longer than the window of 100 ms" in s for s in words(strangers(4096)))


def test_a_ranking_that_is_too_slow_with_its_prefix_is_not_helped():
    slow = Costs({**COSTS.fits, Work.CACHED: Fit(base=60), Work.PREFIX: Fit(n=0.001)})
    question = replace(QUESTION, costs=slow)
    assert not advise(strangers(1600), question).relay
    assert any(
        "even with a prefix they would be too slow" in s for s in words(strangers(1600), question)
    )


def test_relay_does_not_pay_on_a_device_that_is_full():
    busy = strangers(1600, gap=0.05)  # 71 ms of work every 50 ms
    advice = advise(busy, QUESTION)
    assert not advice.relay
    assert advice.facts.relay_load > 1
    assert any("moves work and saves none" in s for s in words(busy))
    more = replace(QUESTION, instances=3)
    assert advise(busy, more).relay


def test_host_memory_can_make_room_for_relay():
    busy = returning(1600, gap=0.05)
    advice = advise(busy, QUESTION)
    assert advice.facts.relay_load > 1
    assert advice.facts.host_load < 1
    assert advice.relay
    assert advice.host


def test_a_busy_device_is_warned_about():
    assert any("queues alone may break the target" in s for s in words(strangers(1600, gap=0.09)))


def test_memory_is_split_between_instances():
    one = advise(returning(1600), QUESTION).memory[0].mb_for["100%"]
    two = advise(returning(1600), replace(QUESTION, instances=2)).memory[0].mb_for["100%"]
    assert one == 2 * two == 3


def test_a_history_that_grows_past_a_step_is_computed_again():
    growing = log((0, "a", 1600), (1, "a", 1610), (2, "a", 1680))
    # Prefixes of 1536, 1536 and 1600 events.
    assert advise(growing, QUESTION).memory[0].reused == pytest.approx(1 / 3)
    assert advise(growing, QUESTION).memory[0].seen == pytest.approx(2 / 3)


def test_the_log_of_a_workload_shows_its_return_share():
    settings = WorkloadSettings(
        rate=50, seconds=100, length=1600, return_share=0.6, return_median_s=1, popularity=0
    )
    advice = advise(log_of(visits(settings)), QUESTION)
    assert advice.memory[2].seen == pytest.approx(0.6, abs=0.05)


def test_one_request_alone_is_no_rate():
    advice = advise(strangers(1600, count=1), QUESTION)
    assert advice.facts.inline_load == 0
    assert advice.relay


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_log_of_a_workload_reads_back(tmp_path, kind):
    log = log_of(visits(WorkloadSettings(rate=20, seconds=2, length_spread=0.5)))
    write_log(tmp_path / f"log.{kind}", log)
    assert read_log(tmp_path / f"log.{kind}") == log


def test_times_may_be_dates_and_come_in_any_order(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "time,user,history_length,candidates,other\n"
        "2026-01-05T10:00:05,b,20,3,x\n"
        "2026-01-05T10:00:00,a,10,3,y\n"
    )
    first, second = read_log(path)
    assert (first.user, first.history_length) == ("a", 10)
    assert second.time - first.time == 5


def test_users_may_be_numbers(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"time": 1, "user": 7, "history_length": 9, "candidates": 3}\n\n')
    assert read_log(path) == [Logged(1.0, "7", 9, 3)]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "time,user,history_length\n1,a,5\n", "request 1 of .* has no candidates"),
        ("a.csv", "time,user,history_length,candidates\n", "holds no requests"),
        ("a.csv", "time,user,history_length,candidates\nx,a,5,3\n", "time of request 1 .* is 'x'"),
        ("a.csv", "time,user,history_length,candidates\nnan,a,5,3\n", "time of request 1"),
        ("a.csv", "time,user,history_length,candidates\n1,a,-5,3\n", "history_length of request 1"),
        ("a.csv", "time,user,history_length,candidates\n1,a,5,2.5\n", "candidates of request 1"),
        ("a.jsonl", "{oops\n", "cannot read"),
        ("a.jsonl", "[1]\n", "a line is not a JSON object"),
        ("a.parquet", "oops", "cannot read"),
        ("a.txt", "oops", "no log that can be read; use .csv, .jsonl"),
    ],
)
def test_a_wrong_log_is_one_sentence(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(NestpipeError, match=sentence):
        read_log(tmp_path / name)


def test_a_missing_log_and_a_kind_that_cannot_be_written(tmp_path):
    with pytest.raises(NestpipeError, match="there is no file"):
        read_log(tmp_path / "none.csv")
    with pytest.raises(NestpipeError, match="names no kind of log"):
        write_log(tmp_path / "log.txt", [])
