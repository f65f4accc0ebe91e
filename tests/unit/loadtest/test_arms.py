"""Arms as settings, and each of them served for real by a model of a few numbers."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import Record, drive
from nestpipe.loadtest.run import (
    EmulatedRemoteFetch,
    RandomModel,
    model_maker,
    open_arm,
    random_model,
    remote_fit,
)
from nestpipe.loadtest.settings import ARMS, WorkloadSettings, arms_of
from nestpipe.loadtest.workload import Visit, legs
from nestpipe.models import HstuConfig
from nestpipe.serve.engine.admission import Costs, Fit, Work
from nestpipe.serve.engine.calibration import lengths_up_to
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import KV, AdmissionOutcome, Answer, RankPath, RealClock, ServeSettings

BASE = ServeSettings(target_ms=60_000, cut_length=24, device_mb=8, host_mb=8, life_s=30)
WORKLOAD = WorkloadSettings(length=48, short=8, candidates=4, items=50, seconds=1)


def test_arms_differ_where_they_should():
    of = {letter: arm.settings(BASE) for letter, arm in ARMS.items()}
    assert [letter for letter in of if not of[letter].relay] == ["A", "B", "I"]
    assert [letter for letter in of if of[letter].host_mb > 0] == ["D", "G", "H", "I"]
    assert [letter for letter in of if not of[letter].admission] == ["E"]
    assert [letter for letter in of if not of[letter].single_flight] == ["H"]
    assert of["B"].cut_length == BASE.max_events
    assert [letter for letter in ARMS if ARMS[letter].cap(BASE)] == ["A"]
    assert [letter for letter in ARMS if ARMS[letter].scattered] == ["F"]
    assert of["D"] == BASE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("X", "there is no arm 'X'; choose from: A inline capped"), ("A,A", "one of them twice")],
)
def test_wrong_arms_are_one_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        arms_of(text)


def test_an_arm_with_host_memory_needs_some():
    with pytest.raises(ConfigError, match=r"arm D .* needs host memory and serve\.host_mb is 0"):
        ARMS["D"].settings(replace(BASE, host_mb=0))


class Step:
    """A pace without time: each leg is answered before the next is sent."""

    def __init__(self):
        self.pending = []

    def now(self):
        return 0.0

    def wait_until(self, moment):
        for future in self.pending:
            future.result(timeout=30)

    def settle(self, pending, grace_s):
        for future in pending:
            future.result(timeout=30)


def serve(letter, made, base=BASE, instances=1):
    """Run an arm on a tiny model that is said to be far too slow to rank inline."""
    # 64 s for 40 events, 23 s for 24: too slow whole, and in no hurry where a prefix is on its way.
    slow = {Work.INLINE: Fit(nn=40.0), Work.CACHED: Fit(base=0.1), Work.PREFIX: Fit(base=0.1)}
    config = HstuConfig(blocks=1, heads=1, dim=8, attention_dim=4, value_dim=4, max_len=64)
    models = [HstuRankModel.random(config, 50, device="cpu") for _ in range(instances)]
    pace = Step()
    with open_arm(ARMS[letter], base, models, Costs(slow), RealClock()) as service:
        rank = service.rank

        def remember(request):
            pace.pending.append(rank(request))
            return pace.pending[-1]

        service.rank = remember
        sent = list(legs(WORKLOAD, made, ARMS[letter].cap(base)))
        return drive(service, sent, pace)


def answer(record: Record) -> Answer:
    assert record.answer is not None, record.error
    return record.answer


def made(count: int, users: int = 1) -> list[Visit]:
    """Visits one after the other, signal then ranking."""
    return [Visit(n, n * 1.0, n + 0.5, n % users, 40, 8, 4) for n in range(count)]


def test_inline_capped_uses_the_cap():
    records = serve("A", made(3)).records
    assert [answer(record).path for record in records] == [RankPath.MISS_FULL] * 3
    assert [record.length_used for record in records] == [24] * 3
    assert all(record.cut for record in records)


def test_inline_full_is_never_cut():
    records = serve("B", made(3)).records
    assert [record.length_used for record in records] == [48] * 3
    assert {record.outcome for record in records} == {AdmissionOutcome.NOT_AT_RISK}


def test_relay_prepares_every_visit():
    done = serve("C", made(3))
    assert {record.outcome for record in done.records} <= {
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.ALREADY_CACHED,
    }
    assert {answer(record).path for record in done.records} <= {RankPath.HBM_HIT, RankPath.LATE_HIT}
    assert all(record.full for record in done.records)
    assert done.counted.get("reloads", 0) == 0


def test_every_arm_answers_every_request_with_the_same_scores():
    expected = [answer(record).scores_C for record in serve("B", made(4, users=2)).records]
    for letter in "CDEFGHI":
        instances = 2 if letter == "F" else 1
        records = serve(letter, made(4, users=2), instances=instances).records
        assert all(answer(record).length_used in (24, 48) for record in records)
        assert letter in "FH" or all(record.full for record in records)  # these two may miss
        for record, scores_C in zip(records, expected, strict=True):
            if record.full:
                np.testing.assert_allclose(answer(record).scores_C, scores_C, rtol=1e-4, atol=1e-5)


def test_host_memory_without_relay_keeps_what_rankings_made():
    done = serve("I", made(2))
    assert {record.outcome for record in done.records} == {AdmissionOutcome.NOT_AT_RISK}
    assert done.counted["fills"] >= 1


def test_a_remote_fetch_waits_before_it_copies():
    waited = []
    config = HstuConfig(blocks=1, heads=1, dim=8, attention_dim=4, value_dim=4)
    inner = HstuRankModel.random(config, 5, device="cpu")
    far = EmulatedRemoteFetch(inner, waited.append)
    kv = KV(torch.ones(1, 5, 1, 4), torch.ones(1, 5, 1, 4))
    copied = far.to_device(far.to_host(kv))
    assert waited == [pytest.approx(0.001 + 160 / 5e9)]
    assert torch.equal(copied.keys_LNHA, kv.keys_LNHA)
    assert (far.version, far.dtype, far.kv_bytes(7)) == (
        inner.version,
        inner.dtype,
        inner.kv_bytes(7),
    )


def test_the_prediction_of_a_remote_fetch_knows_of_the_delay():
    assert remote_fit(Fit(base=0.5)).at(5_000_000) == pytest.approx(0.5 + 1 + 1)


def test_no_thread_is_left_behind():
    before = threading.active_count()
    serve("D", made(1))
    assert threading.active_count() == before


def test_a_random_model_is_read_from_its_sizes():
    assert random_model("layers=2, dim=32,heads=4") == RandomModel(layers=2, dim=32, heads=4)
    assert random_model("") == RandomModel()
    assert RandomModel(dim=64, heads=4).config.attention_dim == 16
    one, two = (model_maker(None, RandomModel(dim=8), device="cpu", dtype="float32") for _ in "ab")
    assert one().version == two().version


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers", "'layers' says nothing of a random model"),
        ("layer=4", "did you mean layers"),
        ("dim=10,heads=4", "dim is 10 and heads 4"),
        ("layers=0", "layers is 0"),
    ],
)
def test_wrong_sizes_are_one_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        random_model(text)


def test_costs_are_measured_up_to_the_longest():
    assert lengths_up_to(1024) == [128, 256, 512, 1024]
    assert lengths_up_to(1) == [1]
