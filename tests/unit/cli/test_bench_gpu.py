"""`nestpipe bench dlrm`, `embedding` and `dispatch` on cases so small that only shapes count."""

import json

import pytest

from nestpipe.cli.app import main

TINY_DLRM = (
    *("--device", "cpu", "--rows", "100", "--batch", "16", "--steps", "3"),
    *("--set", "features=3", "--set", "dim=4", "--set", "bottom=[8]", "--set", "top=[8]"),
    *("--set", "warm=4", "--set", "distinct=2"),
)
TINY_EMBEDDING = (
    *("--device", "cpu", "--tables", "2", "--samples", "16", "--rows", "60", "--dim", "4"),
    *("--steps", "3", "--rounds", "2", "--set", "warm=4", "--no-peer"),
)


def run(capfd, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    return stop.value.code, capfd.readouterr()


def test_every_variant_of_the_dlrm_is_timed_for_every_number_of_keys(capfd):
    variants = ("--plans", "serial,nested", "--retrieval", "new,pooled", "--micro-batches", "2")
    status, said = run(
        capfd, "dlrm", *TINY_DLRM, *variants, "--rounds", "2", "--no-peer", "--json", "-"
    )
    assert status == 0, said.err
    results = json.loads(said.out)["results"]
    assert [(seen["work"], seen["form"]) for seen in results] == [
        (keys, f"{plan} {retrieval}, N = 2")
        for keys in ("1 key", "10 keys")
        for plan in ("serial", "nested")
        for retrieval in ("new", "pooled")
    ]
    for seen in results:
        assert seen["system"] == "NestPipe"
        assert len(seen["rounds_ms"]) == 2
        assert seen["range_ms"][0] <= seen["step_ms"] <= seen["range_ms"][1]
        assert seen["samples_per_s"] == pytest.approx(16_000 / seen["step_ms"])
        assert seen["over_peer"] is None


def test_the_ranks_of_a_dlrm_share_one_machine(capfd):
    several = ("--ranks", "2", "--placement", "rows", "--keys", "2", "--rounds", "1")
    form = ("--plans", "nested", "--retrieval", "new")
    status, said = run(capfd, "dlrm", *TINY_DLRM, *several, *form, "--no-peer", "--json", "-")
    assert status == 0, said.err
    (seen,) = json.loads(said.out)["results"]
    assert seen["samples"] == 32


def test_embedding_work_is_timed_for_every_optimizer(capfd):
    both = ("--where", "hbm,host", "--optimizer", "sgd,adam")
    status, said = run(capfd, "embedding", *TINY_EMBEDDING, *both, "--json", "-")
    assert status == 0, said.err
    found = json.loads(said.out)
    assert [case["distinct"] for case in found["cases"]] == [6, 6, 0, 0]
    assert [(seen["work"], seen["form"]) for seen in found["results"]] == [
        ("hbm, sgd", "nested pooled"),
        ("hbm, adam", "nested pooled"),
        ("host, sgd", "nested new"),
        ("host, adam", "nested new"),
    ]
    assert all(len(seen["rounds_ms"]) == 2 for seen in found["results"])


def test_a_pool_that_is_too_small_costs_only_its_own_figures(capfd):
    small = ("--where", "cache,host", "--optimizer", "sgd", "--share", "0.01")
    status, said = run(capfd, "embedding", *TINY_EMBEDDING, *small, "--json", "-")
    assert status == 3
    first, second = json.loads(said.out)["results"]
    assert first["failed"]
    assert first["step_ms"] is None
    assert len(second["rounds_ms"]) == 2
    assert "no figures of NestPipe nested pooled on cache, sgd" in said.err


def test_host_time_is_told_by_op_and_by_thread(capfd):
    form = ("--plan", "nested", "--retrieval", "new", "--micro-batches", "2")
    status, said = run(capfd, "dispatch", *TINY_DLRM, *form, "--json", "-")
    assert status == 0, said.err
    found = json.loads(said.out)
    for seen in (found["training"], found["executor"]):
        assert {"prefetch", "dedup", "rows", "dense", "update", "writeback"} <= set(seen["acts_ms"])
        in_threads = seen["issuing_ms"] + sum(seen["lanes_ms"].values())
        assert seen["threads_ms"] == pytest.approx(in_threads)
        assert seen["between_ms"] == pytest.approx(in_threads - sum(seen["acts_ms"].values()))
    assert found["executor"]["acts_ms"]["dense"] < found["training"]["acts_ms"]["dense"]


def test_tables_are_printed_for_people(capfd):
    form = ("--plan", "serial", "--retrieval", "whole")
    status, said = run(capfd, "dispatch", *TINY_DLRM, *form)
    assert status == 0, said.err
    assert "issuing thread and lanes" in said.out


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (("dlrm", "--keys", "0"), "keys are '0'; give whole numbers from 1 on"),
        (("dlrm", "--device", "tpu"), "device is 'tpu'; use cpu or cuda"),
        (("dlrm", "--plans", "nestd"), "unknown plan 'nestd'"),
        (("dlrm", "--retrieval", "old"), "unknown retrieval 'old'"),
        (("dlrm", "--placement", "column"), "placement is 'column'"),
        (("dlrm", "--set", "bach=4"), "did you mean batch?"),
        (("dlrm", "--peer", "nowhere"), "'nowhere' holds no torchrec"),
        (("embedding", "--where", "disk"), "where is 'disk'"),
        (("embedding", "--optimizer", "lamb"), "optimizer is 'lamb'; use one of sgd"),
        (("embedding", "--share", "2"), "share is 2.0"),
        (("embedding", "--peer", "nowhere"), "'nowhere' holds no fbgemm_gpu"),
        (("dispatch", "--plan", "nestd"), "unknown plan 'nestd'"),
        (("dispatch", "--retrieval", "old"), "unknown retrieval 'old'"),
    ],
)
def test_wrong_input_is_one_sentence(capfd, wrong, sentence):
    no_peer = () if wrong[0] == "dispatch" or "--peer" in wrong else ("--no-peer",)
    status, said = run(capfd, *wrong, *no_peer)
    assert status == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1
