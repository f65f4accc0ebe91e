"""Realistic mistakes: each is one sentence that names the value, with no traceback, before harm.

On the command line the status is 2, and standard error is that one line. In Python it is a class of
`nestpipe.errors` whose `exit_status` is 2. Mistakes of factories, exports and requests stand beside
these: `models/test_factory.py`, `cli/test_export.py`, `serve/http/test_instance_app.py`.
"""

import gzip
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

from nestpipe import (
    Batch,
    DenseSettings,
    Dlrm,
    DlrmConfig,
    Jagged,
    Loss,
    ParallelSettings,
    PipelineSettings,
    RowSettings,
    Table,
    TaskLoss,
    Trainer,
    TrainSettings,
    launch,
)
from nestpipe.cli.app import main
from nestpipe.config import build, load
from nestpipe.errors import LossError, NestpipeError
from nestpipe.models import HstuConfig, HstuRetriever, SampledSoftmaxConfig
from nestpipe.models.dlrm import table_names
from nestpipe.train.config import JobConfig, ModelConfig
from nestpipe.train.job import idle_settings

CONFIGS = Path(__file__).parents[2] / "configs"

# On the command line

CLICKS = {"user": [1, 2, 3] * 20, "item": [4, 5, 6] * 20, "label": [0.0, 1.0, 0.0] * 20}
PARQUET = ["--set", "data.kind=parquet", "--set", "data.parquet.labels=['label']"]
SEQUENCES = [
    *("--set", "data.synthetic.flavour=sequence"),
    *("--set", "data.synthetic.samples=60"),
    *("--set", "data.synthetic.test_samples=10"),
    *("--set", "run.batch=20"),
    *("--set", "run.device=cpu"),
    *("--set", "run.steps=1"),
]


GENERATED = [
    *("--set", "data.synthetic.samples=40"),
    *("--set", "data.synthetic.test_samples=40"),
    *("--set", "data.synthetic.num_tables=2"),
    *("--set", "run.device=cpu"),
    *("--set", "run.steps=1"),
]


def assign(*assignments: str) -> list[str]:
    return [word for one in assignments for word in ("--set", one)]


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a config that is not there": (["train", "nope.toml"], "there is no file nope.toml"),
    "a config that is no TOML": (["train", "broken.toml"], "line 1 of broken.toml is not TOML"),
    "a config that is a folder": (["train", "."], "is a directory; name a TOML file"),
    "a section spelled wrongly": (["train", *assign("modle.dim=3")], "did you mean model?"),
    "a key spelled wrongly": (["train", *assign("run.bathc=3")], "did you mean batch?"),
    "text for a number": (["train", *assign("run.batch=many")], "give a whole number"),
    "a float for a whole number": (["train", *assign("run.batch=3.5")], "run.batch is 3.5"),
    "no value to set": (["train", *assign("run.batch")], "write it as section.key=value"),
    "no samples in a batch": (["train", *assign("run.batch=0")], "give a number above 0"),
    "a negative rate": (["train", *assign("rows.lr=-1")], "rows.lr is -1.0"),
    "a dense optimizer": (["train", *assign("dense.optimizer=adamm")], "did you mean 'adam"),
    "a row optimizer": (["train", *assign("rows.optimizer=adagard")], "did you mean 'adagrad'?"),
    "a plan": (["train", *assign("pipeline.plan=nestd")], "use one of auto, serial"),
    "no micro-batches": (["train", *assign("pipeline.micro_batches=0")], "use 1 to 1024"),
    "half precision": (["train", *assign("pipeline.comm_dtype=fp16")], "'float32', 'bfloat16'"),
    "a device": (["train", *assign("run.device=gpu")], "run.device is 'gpu'"),
    "a model": (["train", *assign("model.kind=dlmr")], "did you mean 'dlrm'?"),
    "rows of no width": (["train", *assign("model.dim=0")], "model.dim is 0"),
    "no heads": (["train", *assign("model.heads=0")], "model.heads is 0"),
    "a temperature of zero": (["train", *assign("model.temperature=0")], "temperature is 0.0"),
    "no ranks": (["train", "--ranks", "0"], "ask for at least 1"),
    "groups of one rank": (["train", *assign("parallel.groups=2")], "there is 1 rank; use 1"),
    "a command": (["trian"], "Did you mean 'train'?"),
    "a flag": (["train", "--rank", "2"], "No such option: --rank"),
    "data without a path": (["train", *assign("data.kind=parquet")], "data.path is missing"),
    "a path without a kind": (["train", *assign("data.path=clicks.parquet")], "kind is 'synth"),
    "data that is not there": (
        ["train", *PARQUET, *assign("data.path=nope.parquet")],
        "there is no file or folder 'nope.parquet'",
    ),
    "data that is no Parquet": (
        ["train", *PARQUET, *assign("data.path=broken.parquet")],
        "is truncated or no Parquet file",
    ),
    "labels that are words": (
        ["train", *PARQUET, *assign("data.path=words.parquet")],
        "column label of words.parquet is string",
    ),
    "ratings as labels": (
        ["train", *PARQUET, *assign("data.path=ratings.parquet", "data.test_path=ratings.parquet")],
        "label is 10, not from 0 to 1",
    ),
    "all labels one": (
        ["train", *PARQUET, *assign("data.path=ones.parquet", "data.test_path=ones.parquet")],
        "is 1, so there is nothing to learn",
    ),
    "a label that is not there": (
        ["train", *PARQUET, *assign("data.path=clicks.parquet", "data.parquet.labels=['likes']")],
        "likes",
    ),
    "a next-item model on clicks": (
        ["train", *assign("model.kind=hstu")],
        "the data has no histories; use 'dlrm'",
    ),
    "a ranker on clicks": (["train", *assign("model.kind=ranker")], "the data has no sequences"),
    "too few items": (
        ["train", *SEQUENCES, *assign("model.kind=hstu", "model.num_items=5")],
        "items are 1 to 5; correct model.num_items",
    ),
    "too few items to rank": (
        ["train", *SEQUENCES, *assign("model.kind=ranker", "model.num_items=5")],
        "none of the 5 items; correct model.num_items",
    ),
    "to go on from nothing": (["train", "--resume", "nowhere"], "no checkpoint in 'nowhere'"),
    "to go on from no folder": (["train", "--resume", "auto"], "run.checkpoint is empty"),
    "a folder that cannot be": (["train", *assign("run.checkpoint=/proc/x")], "cannot write to"),
    "a trace into nowhere": (["train", "--trace", "no/such/t.json"], "an existing folder"),
    "to evaluate nothing": (["eval", "nowhere"], "there is no checkpoint in 'nowhere'"),
    "to evaluate on training": (
        ["train", *assign("run.eval_split=train")],
        "run.eval_split is 'train'",
    ),
    "to verify no plan": (["verify", "--plan", "nope"], "pipeline.plan is 'nope'"),
    "to verify no steps": (["verify", "--steps", "0"], "greater than or equal to 1"),
    "to serve nothing": (["serve", "nowhere"], "there is no checkpoint 'nowhere'"),
    "to serve a file": (["serve", "clicks.parquet"], "is no folder; name a checkpoint's folder"),
    "to serve an empty folder": (["serve", "."], "holds no checkpoint"),
    "to export nothing": (["export", "nowhere", "out"], "there is no checkpoint in 'nowhere'"),
    "memory without a unit": (
        [
            *("train", *assign("run.device_memory=lots", "pipeline.retrieval=pooled")),
            *assign("pipeline.plan=nested", "run.device=cpu", "data.synthetic.samples=500"),
        ],
        "device_memory is 'lots'",
    ),
    "a config of a shipped model": (
        ["train", *assign("model.config.dim=3")],
        "it is for a model of your own",
    ),
    "a number in quotes": (["train", "quoted.toml"], "run.batch is '512'; give a whole number"),
    "a section that is a value": (["train", "flat.toml"], "run is 3; make it a section"),
    "a key given twice": (["train", "twice.toml"], "cannot overwrite a value; correct that line"),
    "a config in Latin-1": (["train", "latin1.toml"], "line 2 of latin1.toml is not UTF-8"),
    "a config in YAML": (["train", "job.yaml"], "line 1 of job.yaml is not TOML"),
    "an endless rate": (["train", *assign("rows.lr=inf")], "rows.lr is inf; give a finite number"),
    "an endless norm": (["train", *assign("run.clip_norm=inf")], "run.clip_norm is inf"),
    "a seed of 80 bits": (["train", *assign(f"run.seed={1 << 80}")], "give a whole number of 64"),
    "a hundred thousand threads": (
        ["train", *assign("run.threads=100000")],
        "run.threads is 100000; give at most 1,024",
    ),
    "a layer of no width": (["train", *assign("model.top=[0]")], "model.top is 0; give a number"),
    "a layer that is no list": (["train", *assign("model.top=64")], "such as [1, 2]"),
    "yes for true": (["train", *assign("run.incremental=yes")], "give true or false"),
    "momentum": (["train", *assign("dense.momentum=0.9")], "unknown key dense.'momentum'"),
    "three betas": (["train", *assign("rows.betas=[0.9,0.9,0.9]")], "give two numbers from 0"),
    "adamw without decay": (["train", *assign("rows.optimizer=adamw")], "weight_decay is 0"),
    "a cosine without a length": (
        ["train", *assign("rows.schedule=cosine")],
        "say in how many batches the rate falls",
    ),
    "a schedule": (["train", *assign("dense.schedule=linear")], "'constant', 'cosine', 'step'"),
    "frozen rows of no table": (
        ["train", *GENERATED, *assign("rows.frozen=['nope']")],
        "rows.frozen has 'nope', which fits no table; there are c0",
    ),
    "a rate of no parameter": (
        ["train", *GENERATED, *assign("dense.rates=['nope.*=0.1']")],
        "fits no parameter",
    ),
    "a metric to stop by": (
        ["train", *GENERATED, *assign("run.early_stop=acu")],
        "run.early_stop is 'acu', which no evaluation of the model has; did you mean 'auc'?",
    ),
    "a metric to keep by": (
        ["train", *GENERATED, *assign("run.keep_best=accuracy")],
        "run.keep_best is 'accuracy', which no evaluation of the model has; give one of",
    ),
    "a metric of clicks for items": (
        ["train", *SEQUENCES, *assign("model.kind=hstu", "run.early_stop=auc")],
        "give one of hr@1",
    ),
    "a logger": (["train", *assign("run.loggers=['tensorbord']")], "did you mean 'tensorboard'?"),
    "logs into a file": (
        ["train", *GENERATED, *assign("run.log=clicks.parquet")],
        "cannot write the log 'clicks.parquet': File exists",
    ),
    "logs where none can be": (
        ["train", *GENERATED, *assign("run.log=/proc/x")],
        "cannot write the log '/proc/x'",
    ),
    "checkpoints into a file": (
        ["train", *GENERATED, *assign("run.checkpoint=clicks.parquet")],
        "cannot write to 'clicks.parquet'",
    ),
    "to verify a checkpoint": (["verify", "folder"], "folder is a directory; name a TOML file"),
    "to evaluate a config": (["eval", "twice.toml"], "in 'twice.toml'; check its name\n"),
    "another config to evaluate": (["eval", "folder", "twice.toml"], "unexpected extra argument"),
    "to export a format": (["export", "folder", "out", "--format", "csv"], "'csv' is not one of"),
    "to import nothing": (["import", "nowhere", "out"], "there is no folder 'nowhere'"),
    "to list no checkpoints": (["checkpoint", "ls", "nowhere"], "no checkpoint in 'nowhere'"),
    "to describe nothing": (["data", "describe", "nope"], "no file or folder 'nope'"),
    "to make data over data": (
        ["data", "synth", "folder", "--samples", "10"],
        "folder already holds clicks.parquet",
    ),
    "to show nothing": (["show", "nowhere"], "there is no folder 'nowhere'"),
    "to draw a data file": (["draw", "clicks.parquet"], "is not a text file"),
    "workers in words": (["simulate", "--workers", "1,two"], "workers cannot be 'two'"),
    "a module that is not there": (
        ["train", *GENERATED, *assign("model.kind=nowhere:make")],
        "there is no module 'nowhere' in the working directory",
    ),
    "a factory without a name": (["train", *assign("model.kind=own:")], "package.module:factory"),
}

FILES: dict[str, tuple[str, str]] = {
    "keys as floats": ("floats.parquet", "double, which cannot be keys; write whole numbers or"),
    "keys as bytes": ("bytes.parquet", "column user of bytes.parquet is binary"),
    "keys in structures": ("structures.parquet", "column user of structures.parquet is struct"),
    "keys as times": ("times.parquet", "timestamp[us], which cannot be keys; name another"),
    "keys that are empty": ("nulls.parquet", "column user of nulls.parquet is null"),
    "lists of lists of keys": ("nested.parquet", "which cannot be keys; name another"),
    "no label known": ("unlabelled.parquet", "row 1 of unlabelled.parquet is broken: label is no"),
    "one label unknown": ("gap.parquet", "row 2 of gap.parquet is broken: label is no number, or"),
    "labels of -1 and 1": ("signs.parquet", "signs.parquet: label is -1, not from 0 to 1"),
    "a feature that is NaN": ("nan.parquet", "row 2 of nan.parquet is broken: age is not finite"),
    "a feature above floats": ("huge.parquet", "row 1 of huge.parquet is broken: age is not fini"),
    "a feature in words": ("wordy.parquet", "column age of wordy.parquet is string, which cannot"),
    "no rows": ("none.parquet", "the train split of none.parquet has no samples"),
    "no bytes": ("empty.parquet", "empty.parquet is truncated or no Parquet file; write it again"),
    "a CSV file": ("clicks.csv", "clicks.csv is no Parquet file, by its name .csv; write it as P"),
    "a packed file": ("clicks.parquet.gz", "by its name .gz; write it as Parquet"),
    "a folder without files": ("bare", "there are no Parquet files in 'bare'; check data.path"),
    "ids in two types": (
        "mixed",
        "elsewhere its keys are whole numbers, so an id would have two keys",
    ),
    "a file without a column": ("narrow", "narrow/b.parquet has no column age, it has user, item,"),
}
"""Files, and what is said of training on them with these columns."""

SPLITS: dict[str, tuple[list[str], str]] = {
    "a test path that is not there": (["data.test_path=nope"], "'nope'; check data.test_path"),
    "a validation path, too": (["data.validation_path=nope"], "check data.validation_path"),
    "a test split without rows": (["data.test_path=none.parquet"], "the test split of none.parq"),
    "a test split of strings": (["data.test_path=strings.parquet"], "strings.parquet is string"),
    "two test splits": (["data.test_every=9", "data.test_path=x"], "both say what to test on"),
    "a test split of all rows": (["data.test_every=1"], "data.test_every is 1"),
    "a column that is not there": (["data.parquet.sparse=['usr']"], "has no column usr, it has"),
    "a column in capitals": (["data.parquet.sparse=['User']"], "has no column User, it has user"),
    "a column with two uses": (["data.parquet.sparse=['age']"], "age is named twice"),
    "the label as a feature": (
        ["data.parquet.dense=['label']"],
        "label of aged.parquet is a label and named",
    ),
    "a name for a list": (["data.parquet.sparse=user"], "sparse is 'user'; give a list"),
    "a label that is ignored": (
        ["data.parquet={ignore=['label'], dense=['age']}"],
        "the data has no label; name its column in data.parquet.labels",
    ),
    "a history that is a number": (
        ["data.parquet={history='user'}", "model.kind=hstu"],
        "which cannot be a list of items per row",
    ),
    "clicks for a next-item model": (
        ["model.kind=hstu"],
        "use 'dlrm', or name the column of items in data.parquet.history",
    ),
}


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[object, str]]:
    """Status and standard error of a command, in a folder with some files."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(CLICKS), "clicks.parquet")
    pq.write_table(pa.table({**CLICKS, "label": ["a", "b", "c"] * 20}), "words.parquet")
    pq.write_table(pa.table({**CLICKS, "label": [1.0, 7.0, 10.0] * 20}), "ratings.parquet")
    pq.write_table(pa.table({**CLICKS, "label": [1.0] * 60}), "ones.parquet")
    Path("broken.parquet").write_text("hello")
    Path("broken.toml").write_text("[run\nbatch = 3")
    Path("quoted.toml").write_text('[run]\nbatch = "512"\n')
    Path("flat.toml").write_text("run = 3\n")
    Path("twice.toml").write_text("[run]\nbatch = 1\nbatch = 2\n")
    Path("latin1.toml").write_bytes('[run]\ncheckpoint = "Zürich"\n'.encode("latin-1"))
    Path("job.yaml").write_text("run:\n  batch: 3\n")
    Path("folder").mkdir()
    pq.write_table(pa.table(CLICKS), "folder/clicks.parquet")

    def go(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        return stop.value.code, capsys.readouterr().err

    return go


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_on_the_command_line_is_one_sentence(run, mistake: str):
    command, told = COMMANDS[mistake]
    status, said = run(*command)
    assert status == 2, said
    assert told in said
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")


AGED = {**CLICKS, "age": [0.5, 1.5, 2.5] * 20}


def columns(**changed: Any) -> pa.Table:
    return pa.table({name: column for name, column in {**AGED, **changed}.items() if column})


def write_odd_files() -> None:
    one_day = datetime(2026, 1, 1)
    odd: dict[str, pa.Table] = {
        "floats": columns(user=[1.0, 2.0, 3.0] * 20),
        "bytes": columns(user=[b"a", b"b", b"c"] * 20),
        "structures": columns(user=[{"id": 1}] * 60),
        "times": columns(user=pa.array([one_day] * 60, pa.timestamp("us"))),
        "nulls": columns(user=pa.nulls(60)),
        "nested": columns(user=[[[1]]] * 60),
        "unlabelled": columns(label=pa.nulls(60, pa.float32())),
        "gap": columns(label=pa.array([0.0, None, 1.0] * 20)),
        "signs": columns(label=[-1, 1, 1] * 20),
        "nan": columns(age=[0.0, float("nan"), 1.0] * 20),
        "huge": columns(age=[1e300] * 60),
        "wordy": columns(age=["old"] * 60),
        "none": columns().slice(0, 0),
        "strings": columns(user=["a", "b", "c"] * 20),
        "aged": columns(),
        "mixed/a": columns(),
        "mixed/b": columns(user=["a", "b", "c"] * 20),
        "narrow/a": columns(),
        "narrow/b": columns(age=None),
    }
    for folder in ("mixed", "narrow", "bare"):
        Path(folder).mkdir()
    for name, table in odd.items():
        pq.write_table(table, f"{name}.parquet")
    Path("empty.parquet").write_bytes(b"")
    Path("clicks.csv").write_text("user,item,age,label\n1,2,0.5,1\n")
    Path("clicks.parquet.gz").write_bytes(gzip.compress(Path("aged.parquet").read_bytes()))


USED = assign(
    "data.kind=parquet",
    "data.parquet.sparse=['user', 'item']",
    "data.parquet.dense=['age']",
    "run.batch=20",
    "run.steps=1",
    "run.device=cpu",
)


@pytest.mark.parametrize("mistake", FILES)
def test_a_mistake_in_a_file_is_one_sentence(run, mistake: str):
    write_odd_files()
    path, told = FILES[mistake]
    status, said = run("train", *USED, *assign(f"data.path={path}"))
    assert (status, said.count("\n")) == (2, 1), said
    assert told in said


@pytest.mark.parametrize("mistake", SPLITS)
def test_a_mistake_about_columns_or_splits_is_one_sentence(run, mistake: str):
    write_odd_files()
    settings, told = SPLITS[mistake]
    status, said = run("train", *USED, *assign("data.path=aged.parquet", *settings))
    assert (status, said.count("\n")) == (2, 1), said
    assert told in said


def test_a_checkpoint_of_other_tables_is_refused_once(run):
    saving = assign("run.checkpoint=runs", "run.checkpoint_every=1", "run.batch=20", "run.steps=2")
    assert run("train", *GENERATED, *saving)[0] == 0
    status, said = run("eval", "runs", *assign("model.dim=8"))
    assert (status, said.count("\n")) == (2, 1), said
    assert "has rows of width 32, and that of the model 8; use the config" in said


IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "saving without a place": (
        {"run": {"checkpoint_every": 5}},
        "run.checkpoint_every does nothing: run.checkpoint is empty",
    ),
    "increments without a place": ({"run": {"incremental": True}}, "run.incremental does nothing"),
    "the best of all": (
        {"run": {"checkpoint": "x", "keep_best": "auc"}},
        "run.keep_best does nothing without keep_last or keep_hours",
    ),
    "loggers without a place": ({"run": {"loggers": ["jsonl"]}}, "run.loggers does nothing"),
    "decay of a constant rate": ({"rows": {"decay_steps": 5}}, "rows.decay_steps does nothing"),
    "more micro-batches than samples": (
        {"run": {"batch": 8}, "pipeline": {"micro_batches": 5}},
        "pipeline.micro_batches is 5, more than the 4 samples",
    ),
    "a stream twice": (
        {"data": {"kind": "stream", "path": "x"}, "run": {"epochs": 2}},
        "run.epochs does nothing",
    ),
    "a width that an own model does not read": (
        {"model": {"kind": "own:make", "dim": 64}},
        "model.dim does nothing: own:make reads [model.config] alone",
    ),
    "heads of a model without attention": (
        {"model": {"kind": "dlrm", "heads": 4}},
        "model.heads does nothing: dlrm does not read it",
    ),
    "made-up data beside one's own": (
        {"data": {"kind": "parquet", "path": "x", "synthetic": {"samples": 5}}},
        "data.synthetic does nothing: data.kind is 'parquet'",
    ),
    "histories longer than they are read": (
        {"data": {"kind": "parquet", "path": "x"}, "model": {"kind": "hstu", "max_len": 1000}},
        "model.max_len is 1000, but of each history the latest 200 items are kept; set data.parq",
    ),
}


@pytest.mark.parametrize("setting", IDLE)
def test_a_setting_that_does_nothing_is_told(setting: str):
    given, told = IDLE[setting]
    (said,) = idle_settings(build(JobConfig, given), ranks=2)
    assert said.startswith(told)


def test_nothing_is_said_of_settings_that_do_something():
    run = {"checkpoint": "x", "checkpoint_every": 5, "log": "y", "loggers": ["jsonl"]}
    assert idle_settings(build(JobConfig, {"run": run}), ranks=1) == []


def test_what_auto_stands_for_reads_its_own_keys():
    config = build(JobConfig, {"model": {"blocks": 3, "top": [8]}})
    clicks = Dlrm(DlrmConfig(features=("a", "b"), dense_features=1))
    sequences = HstuRetriever(HstuConfig(), SampledSoftmaxConfig(num_items=5))
    assert idle_settings(config, 1, clicks) == ["model.blocks does nothing: dlrm does not read it"]
    assert idle_settings(config, 1, sequences) == ["model.top does nothing: hstu does not read it"]


@pytest.mark.parametrize(
    "path", sorted({*CONFIGS.glob("*.toml")} - {CONFIGS / "offer.toml"}), ids=lambda path: path.stem
)
def test_configs_to_start_from_have_no_setting_that_does_nothing(path: Path):
    assert idle_settings(load(JobConfig, path), ranks=1) == []


def test_a_warning_does_not_end_the_run(run, caplog: pytest.LogCaptureFixture):
    status, _ = run("train", *GENERATED, *assign("run.checkpoint_every=1"))
    assert status == 0
    assert "run.checkpoint_every does nothing" in caplog.text


def test_a_run_that_is_over_says_so(run, capsys: pytest.CaptureFixture[str]):
    saving = [*GENERATED, *assign("run.checkpoint=runs")]
    with pytest.raises(SystemExit):
        main(["train", *saving])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["train", *saving, "--resume", "auto"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "nothing to train after step 1, where run.steps = 1 ends; set more to go on" in out
    assert "nan" not in out


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            [
                "run.batch=10",
                "run.eval_every=1",
                "run.early_stop=auc",
                "run.patience=1",
                "run.min_delta=1",
            ],
            "after step 2, where run.early_stop = 'auc' ended the run; set a larger run.patience",
        ),
        (["run.batch=20"], "after step 2, where run.epochs = 1 ends; set more to go on"),
    ],
)
def test_what_ended_a_run_that_is_over_is_what_is_blamed(
    run, capsys: pytest.CaptureFixture[str], settings: list[str], told: str
):
    saving = [*GENERATED, *assign("run.checkpoint=runs", "run.steps=9", *settings)]
    for more in ([], ["--resume", "auto"]):
        with pytest.raises(SystemExit) as stop:
            main(["train", *saving, *more])
        assert stop.value.code == 0
    assert f"nothing to train {told}" in capsys.readouterr().out


def test_columns_that_types_have_chosen_are_told(run, capsys: pytest.CaptureFixture[str]):
    write_odd_files()
    given = assign("data.path=aged.parquet", "run.steps=1", "run.batch=20", "run.device=cpu")
    for more in ([], assign("data.parquet.sparse=['user', 'item']")):
        with pytest.raises(SystemExit):
            main(["train", *PARQUET, *given, *more])
    out = capsys.readouterr().out
    assert out.count("columns by their types: keys user, item; numbers age; name them in") == 1


def test_before_the_first_batch_the_bar_shows_no_figures(
    run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(SystemExit):
        main(["train", *GENERATED])
    assert "the first batch" in terminal.getvalue()
    assert "loss 0." in terminal.getvalue()
    assert "nan" not in terminal.getvalue()


def test_training_on_the_test_split_is_told(run, capsys: pytest.CaptureFixture[str]):
    same = assign("data.path=clicks.parquet", "data.test_path=clicks.parquet", "run.steps=1")
    with pytest.raises(SystemExit):
        main(["train", *PARQUET, *same, *assign("run.device=cpu")])
    assert "evaluation on the test split, which is what it trains on, " in capsys.readouterr().out


def test_columns_with_odd_names_have_tables():
    odd = ("user id", "user_id", "price ($)", "7", "größe", "user-id")
    names = table_names(odd)
    assert names == {
        "user id": "user_id_",
        "user_id": "user_id",
        "price ($)": "price____",
        "7": "_7",
        "größe": "größe",
        "user-id": "user_id__",
    }
    tables = Dlrm(DlrmConfig(features=odd, dense_features=0)).tables()
    assert [table.feature_names for table in tables] == [(name,) for name in odd]


def test_no_rate_is_blamed_for_the_first_loss():
    assert "lower the learning rates" in str(LossError(2, float("nan")))
    assert "look at the data for huge numbers" in str(LossError(1, float("nan")))


def test_a_gpu_that_is_not_there_is_told(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, said = run("train", *assign("run.device=cuda"))
    assert (status, said.count("\n")) == (2, 1)
    assert "device is 'cuda' but torch finds no GPU" in said


def test_a_port_in_use_is_told(run, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "step-00000001").mkdir()
        port = str(taken.getsockname()[1])
        status, said = run("serve", ".", "--port", port, "--instances", "1")
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said


# In Python

LABELS = torch.tensor([1.0, 0.0, 1.0, 0.0])
KEYS = Jagged.from_lists([[1], [2], [3], [1]])


class Clicks:
    """A source of one batch of four samples, three times."""

    def __init__(self, batch: Any = None) -> None:
        self.batch = batch or Batch(4, {"label": LABELS}, {"item": KEYS})

    def batches(self, **_: object) -> Iterator[Batch]:
        return iter([self.batch] * 3)

    def empty(self) -> Batch:
        return Batch(0, {"label": LABELS[:0]}, {"item": Jagged.from_lists([])})


class Own(nn.Module):
    """A model as it should be; each mistake changes one thing."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.top = nn.Linear(4, 1)
        self.wrong = wrong

    def sparse_keys(self, batch: Batch) -> Any:
        if "keys" in self.wrong:
            return self.wrong["keys"](batch)
        return {"item": batch.sparse["item"]}

    def dense(self, rows: dict[str, torch.Tensor], batch: Batch) -> Any:
        logits = self.top(rows["item"]).squeeze(1)
        label = batch.dense["label"]
        losses = functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
        if "loss" in self.wrong:
            return self.wrong["loss"](losses, batch)
        return Loss(losses.sum(), batch.size, torch.sigmoid(logits.detach()), label)


def trainer_of(model: nn.Module, tables: list[Table] | None = None) -> Trainer:
    tables = tables if tables is not None else [Table(name="item", dim=4)]
    return Trainer(model, tables, TrainSettings(batch=4, device="cpu"))


def fit(model: nn.Module, tables: list[Table] | None = None, batch: Batch | None = None) -> None:
    trainer = trainer_of(model, tables)
    try:
        trainer.fit(Clicks(batch))  # type: ignore[arg-type]
    finally:
        trainer.close()


def keys(change: Callable[[Batch], Any]) -> Own:
    return Own(keys=change)


def loss(change: Callable[[torch.Tensor, Batch], Any]) -> Own:
    return Own(loss=change)


def with_predictions(losses: torch.Tensor, predictions: torch.Tensor) -> Loss:
    cut = predictions[: len(losses)]
    return Loss(losses.sum(), len(losses), cut, LABELS[: len(losses)])


def no_loss(losses: torch.Tensor, batch: Batch) -> Loss:
    raise AssertionError("so")


def with_nan() -> nn.Module:
    model = Own()
    with torch.no_grad():
        model.top.weight.fill_(float("nan"))
    return model


def holding(part: nn.Module | nn.Parameter) -> nn.Module:
    model = Own()
    model.part = part
    return model


def holding_a_mask() -> nn.Module:
    model = Own()
    model.register_buffer("mask", torch.ones(1).expand(4))
    return model


class Noted(nn.Module):
    """Keeps what is no tensor in its state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


ITEM = Table(name="item", dim=4)
PYTHON: dict[str, tuple[Callable[[], object], str]] = {
    "a pooling": (lambda: Table(name="t", dim=4, pooling="banana"), "pooling of table 't' is 'ba"),  # type: ignore[arg-type]
    "a placement": (lambda: Table(name="t", dim=4, placement="here"), "placement of table 't'"),  # type: ignore[arg-type]
    "a dtype": (lambda: Table(name="t", dim=4, dtype="float8"), "dtype of table 't' is 'float8"),  # type: ignore[arg-type]
    "no width": (lambda: Table(name="t", dim=0), "dim is 0; give a number above 0"),
    "a name with a dash": (lambda: Table(name="my-items", dim=4), "use letters, digits and _"),
    "a negative spread": (lambda: Table(name="t", dim=4, init_std=-1), "init_std is -1"),
    "two tables of one name": (lambda: fit(Own(), [ITEM, ITEM]), "two tables are called 'item'"),
    "a feature of two tables": (
        lambda: fit(Own(), [ITEM, Table(name="other", dim=4, features=("item",))]),
        "feature 'item' belongs to table 'item' and to 'other'",
    ),
    "no table": (lambda: fit(Own(), []), "there is no table; declare at least one"),
    "a feature without a table": (
        lambda: fit(Own(), [Table(name="user", dim=4)]),
        "feature 'item' does not match: no table has it",
    ),
    "a table never used": (
        lambda: fit(Own(), [ITEM, Table(name="user", dim=4)]),
        "feature 'user' does not match: the model gives no keys for it",
    ),
    "a dense optimizer": (lambda: DenseSettings(optimizer="adamwx"), "did you mean 'adamw'?"),  # type: ignore[arg-type]
    "a row optimizer": (lambda: RowSettings(optimizer="ftrl"), "optimizer is 'ftrl'"),  # type: ignore[arg-type]
    "a plan": (lambda: PipelineSettings(plan="nestd"), "plan is 'nestd'; use one of"),
    "a comm_dtype": (lambda: PipelineSettings(comm_dtype="fp16"), "comm_dtype is 'fp16'"),  # type: ignore[arg-type]
    "a micro_batching": (lambda: PipelineSettings(micro_batching="x"), "micro_batching is 'x'"),  # type: ignore[arg-type]
    "a layout": (lambda: ParallelSettings(layout="rings"), "layout is 'rings'"),  # type: ignore[arg-type]
    "a device": (lambda: TrainSettings(device="gpu"), "device is 'gpu'"),  # type: ignore[arg-type]
    "what to do with NaN": (lambda: TrainSettings(non_finite="hope"), "non_finite is 'hope'"),  # type: ignore[arg-type]
    "no groups": (lambda: ParallelSettings(groups=0), "groups is 0"),
    "a model kind": (lambda: ModelConfig(kind="hstuu"), "did you mean 'hstu'?"),
    "a dlrm of one vector": (
        lambda: Dlrm(DlrmConfig(features=("item",), dense_features=0)),
        "too few for a dot product",
    ),
    "a feature twice": (lambda: DlrmConfig(features=("a", "a")), "name each one once"),
    "no model at all": (lambda: fit(nn.Linear(1, 1)), "Linear is not a model for NestPipe"),
    "keys as a plain tensor": (
        lambda: fit(keys(lambda batch: {"item": batch.sparse["item"].values})),
        "gives a Tensor for 'item'; give a Jagged",
    ),
    "keys without a name": (
        lambda: fit(keys(lambda batch: batch.sparse["item"])),
        "returned a Jagged; return a dict of Jagged by feature",
    ),
    "keys of int32": (
        lambda: fit(keys(lambda b: {"item": Jagged(KEYS.values.int(), KEYS.lengths)})),
        "the keys of 'item' are int32; keys are int64",
    ),
    "keys of too few samples": (
        lambda: fit(keys(lambda batch: {"item": Jagged.from_lists([[1]])})),
        "gives 1 lists of 'item' for 4 samples",
    ),
    "lengths that do not add up": (
        lambda: fit(keys(lambda b: {"item": Jagged(KEYS.values[:3], KEYS.lengths)})),
        "add up to 4 and there are 3 keys",
    ),
    "a column that is not there": (
        lambda: fit(keys(lambda batch: {"item": batch.sparse["itm"]})),
        "failed (KeyError: 'itm', test_mistakes.py:",
    ),
    "dense returns a tensor": (
        lambda: fit(loss(lambda losses, batch: losses.sum())),
        "`dense` of Own returned a Tensor; return Loss(total, weight)",
    ),
    "logits as predictions": (
        lambda: fit(loss(lambda losses, batch: with_predictions(losses, LABELS * 4 - 2))),
        "predictions of `dense` of Own have 2, which is no probability; give torch.sigmoid",
    ),
    "predictions in a column": (
        lambda: fit(loss(lambda losses, batch: with_predictions(losses, LABELS[:, None]))),
        "have shape (4, 1) and their labels (4,); give both flat",
    ),
    "a weight of nothing": (
        lambda: fit(loss(lambda losses, batch: Loss(losses.sum(), 0.0))),
        "gives weight 0 for a loss of",
    ),
    "a name that is not there": (
        lambda: fit(loss(lambda losses, batch: losses_of_the_batch)),  # type: ignore[name-defined]  # noqa: F821
        "`dense` of Own failed (NameError: name 'losses_of_the_batch' is not defined, test_mis",
    ),
    "an assertion": (lambda: fit(loss(no_loss)), "`dense` of Own failed (AssertionError: so, "),
    "a shape that torch refuses": (
        lambda: fit(loss(lambda losses, batch: functional.relu(losses.view(3, 5)))),
        "invalid for input of size 4, test_mistakes.py:",
    ),
    "dense returns nothing": (lambda: fit(loss(lambda losses, batch: None)), "returned None"),
    "a loss for each sample": (
        lambda: fit(loss(lambda losses, batch: Loss(losses, batch.size))),
        "a total of shape (4,); return the sum",
    ),
    "a mean": (
        lambda: fit(loss(lambda losses, batch: Loss(losses.mean(), batch.size))),
        "`dense` of Own returns a mean",
    ),
    "a weight of one": (
        lambda: fit(loss(lambda losses, batch: Loss(losses.mean(), 1.0))),
        "gives weight 1 for a batch, and 1 and 1 for its halves",
    ),
    "a weight that is a tensor": (
        lambda: fit(loss(lambda losses, batch: Loss(losses.sum(), torch.tensor(4.0)))),  # type: ignore[arg-type]
        "returned a Tensor as weight; return a plain number",
    ),
    "a loss that nothing learns from": (
        lambda: fit(loss(lambda losses, batch: Loss(losses.sum().detach(), batch.size))),
        "has no gradient; compute it from the rows or the model's weights",
    ),
    "rows of another width": (
        lambda: fit(Own(), [Table(name="item", dim=5)]),
        "`dense` of Own failed (RuntimeError: mat1 and mat2",
    ),
    "labels of another length": (
        lambda: fit(Own(), batch=Batch(4, {"label": LABELS[:3]}, {"item": KEYS})),
        "column 'label' has shape (3,) in a batch of 4 samples",
    ),
    "keys of another length": (
        lambda: Batch(3, {}, {"item": KEYS}),
        "column 'item' has 4 lists in a batch of 3 samples",
    ),
    "keys in two dimensions": (
        lambda: Jagged(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)),
        "the values of a Jagged are (2, 2); give a flat tensor",
    ),
    "a function that no rank can import": (
        lambda: launch(lambda: None, ranks=2),
        "is inside another function, so a new process cannot import it",
    ),
    "no ranks": (lambda: launch(fit, ranks=0), "ranks is 0; start at least 1"),  # type: ignore[arg-type]
    "a layer without a size": (
        lambda: fit(holding(nn.LazyLinear(1))),
        "'part.weight' of Own has no shape yet; call the model once before",
    ),
    "sparse gradients": (
        lambda: fit(holding(nn.Embedding(9, 4, sparse=True))),
        "'part' of Own is an Embedding with sparse=True, whose gradients",
    ),
    "complex weights": (
        lambda: fit(holding(nn.Parameter(torch.ones(2, dtype=torch.complex64)))),
        "'part' of Own has complex numbers; keep real and imaginary parts",
    ),
    "one number for many": (
        lambda: fit(holding_a_mask()),
        "'mask' of Own keeps one number for several entries; call .contiguous()",
    ),
    "a state that is no tensor": (
        lambda: fit(holding(Noted())),
        "'part._extra_state' of Own is a dict, which no checkpoint holds; make it a buffer",
    ),
    "a share of no task": (
        lambda: Loss.of_tasks({"buy": TaskLoss(torch.ones(1), 1)}, 1, shares={"bye": 2.0}),
        "shares has 'bye', which is no task; there are buy",
    ),
    "ratings as labels of predictions": (
        lambda: fit(
            loss(lambda losses, batch: Loss(losses.sum(), len(losses), losses * 0, losses * 0 + 4))
        ),
        "have the label 4, and metrics of clicks need 0 to 1; leave predictions out",
    ),
    "half a batch": (lambda: TrainSettings(batch=2.5), "batch is 2.5; give a whole number"),  # type: ignore[arg-type]
    "a rate in quotes": (lambda: RowSettings(lr="0.1"), "lr is '0.1'; give a number such as"),  # type: ignore[arg-type]
    "half a width": (lambda: Table(name="t", dim=4.5), "dim of table 't' is 4.5; give a whole"),  # type: ignore[arg-type]
    "a feature for a list": (
        lambda: Table(name="t", dim=4, features="items"),  # type: ignore[arg-type]
        "features of table 't' is 'items'; give a list",
    ),
    "a frozen table for a list": (lambda: RowSettings(frozen="items"), "frozen is 'items'; give"),  # type: ignore[arg-type]
    "settings as a dict": (
        lambda: Trainer(Own(), [ITEM], {"batch": 4}),  # type: ignore[arg-type]
        "settings is a dict; give TrainSettings(...)",
    ),
    "tables by name": (lambda: Trainer(Own(), ["item"]), "tables has a str; give a list of Table"),  # type: ignore[list-item]
    "a list as a source": (
        lambda: trainer_of(Own()).fit([]),  # type: ignore[arg-type]
        "a list is no source; give `open_source(...)`, or an object with the methods `batches",
    ),
    "batches as dicts": (
        lambda: trainer_of(Own()).fit(Clicks({"label": LABELS})),  # type: ignore[arg-type]
        "`batches` of the source gave a dict; give a Batch",
    ),
    "steps below zero": (
        lambda: trainer_of(Own()).fit(Clicks(), steps=-1),  # type: ignore[arg-type]
        "steps is -1; give 0 or a number above it",
    ),
    "rows of 32-bit keys": (
        lambda: trainer_of(Own()).rows_of("item", KEYS.values.int()),
        "the keys of 'item' are int32 of shape (4,); give int64 in one dimension",
    ),
    "rows of no table": (
        lambda: Trainer(Own(), [ITEM], TrainSettings(device="cpu")).rows_of("itm", KEYS.values),
        "there is no table 'itm'",
    ),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python_is_one_sentence(mistake: str):
    act, told = PYTHON[mistake]
    with pytest.raises(NestpipeError) as caught:
        act()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_rows_that_get_no_gradient_are_told(caplog: pytest.LogCaptureFixture):
    class Forgets(Own):
        """Looks two features up and reads one; a frozen one needs no gradient."""

        def sparse_keys(self, batch: Batch) -> Any:
            return dict.fromkeys(("item", "cut", "left", "frozen"), batch.sparse["item"])

        def dense(self, rows: dict[str, torch.Tensor], batch: Batch) -> Any:
            return super().dense({"item": rows["item"] + rows["cut"].detach()}, batch)

    frozen = Table(name="frozen", dim=4, trainable=False)
    fit(Forgets(), [ITEM, Table(name="cut", dim=4), Table(name="left", dim=4), frozen])
    said = "`dense` of Forgets gives the rows of '{}' no gradient, so they stay as they are; "
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith(said.format("cut"))
    assert told[1].startswith(said.format("left"))


def test_a_fit_that_trains_nothing_says_so(caplog: pytest.LogCaptureFixture):
    trainer = trainer_of(Own())
    for epochs in (1, 1, 2):
        trainer.fit(Clicks(), epochs=epochs)  # type: ignore[arg-type]
    assert trainer.progress.step == 6
    (told,) = caplog.records
    assert told.getMessage() == (
        "nothing is trained: epochs is 1, and 1 are done; it counts from the start, so give 2 for "
        "one more"
    )


def test_weights_that_are_nan_end_the_run_before_a_row_moves():
    trainer = Trainer(with_nan(), [ITEM], TrainSettings(batch=4, device="cpu"))
    with pytest.raises(NestpipeError, match="step 1 is nan; no row or weight had moved yet"):
        trainer.fit(Clicks())  # type: ignore[arg-type]


def test_ranks_before_the_function_still_start_but_warn():
    warned = pytest.warns(FutureWarning, match=r"launch\(command, ranks\)")
    with warned, pytest.raises(NestpipeError, match="ranks is 0"):
        launch(0, fit)  # type: ignore[arg-type]


def test_a_model_as_it_should_be_trains():
    fit(Own())


def test_sixty_mistakes_are_tried():
    assert len(COMMANDS) + len(PYTHON) >= 60
