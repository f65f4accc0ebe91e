"""Feed every reader files and texts that are almost right; it must read them or say one sentence.

python tools/fuzz.py --reader all --seconds 120
python tools/fuzz.py --reader manifest --seed 4711

Each reader runs in a process of its own, so that a crash is a finding like any other. Examples
follow from their number: `--seed N` tries that one alone and shows what it raises. What is refused
with an error of nestpipe is fine; an other exception, several lines, a crash, or ten seconds
without an answer is not.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nestpipe.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    Manifest,
    hash_of_body,
    newest,
    write_checkpoint,
)
from nestpipe.config import build, load
from nestpipe.data import open_source
from nestpipe.data.config import DataConfig
from nestpipe.data.public_sets import USER_COUNTS, USER_KEYS
from nestpipe.errors import NestpipeError, ScheduleError
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.schedule import PLANS, PlanOptions, check, plan
from nestpipe.schedule.schedule import from_text, to_text
from nestpipe.serve.engine.rank_model import read_weights
from nestpipe.serve.http.bodies import MEDIA_TYPE, HttpError, pack
from nestpipe.serve.http.requests import RequestReader, read_histories
from nestpipe.serve.types import HttpSettings, ServeSettings
from nestpipe.train.job import JobConfig

HANG_S, MEMORY = 10, 6 << 30
ODD_WORDS = (
    *("", "nan", "-nan", "inf", "1e999", "-1", "0", "1e-400", "99999999999999999999", "-9" * 30),
    *("\x00", "\ufeff", "é", "\U0001f600", '"', "'", "\\", "::", ",", "\t", "\r", "null", "true"),
    *("[", "{", "0x10", "1_0", " 7 ", "+3", "٣", "-0", "2022-99-99", "a" * 5000),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**70, 1.5, -0.0, 1e308),
    *("", "x", "\x00", "é" * 9, [], {}, [[]], [None], {"a": {}}, "../../x", "a" * 3000, [1] * 2000),
)


# Changing things


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bits, bytes or spans more, less, other or twice."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice([1, 2, 8, 64, 1000]))
        match rng.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                found[at:end] = rng.randbytes(end - at)
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end]
            case 4:
                del found[at:]
            case _:
                found[at:at] = rng.randbytes(rng.choice([1, 4, 16]))
    return bytes(found)


def changed_text(rng: random.Random, text: str, separators: str) -> bytes:
    """Words and lines moved, lost, doubled, or replaced by odd ones."""
    if rng.random() < 0.2:
        return changed_bytes(rng, text.encode())
    lines = text.splitlines(keepends=True)
    for _ in range(rng.choice([1, 1, 2, 6])):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(6)
        if kind == 0 and lines:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 1 and lines:
            del lines[at]
        elif lines:
            lines[at] = _changed_line(rng, lines[at], rng.choice(separators))
    return "".join(lines).encode("utf-8", "surrogatepass")


def _changed_line(rng: random.Random, line: str, separator: str) -> str:
    words = line.split(separator)
    at = rng.randrange(len(words))
    if rng.random() < 0.15:
        del words[at]
    else:
        words[at] = rng.choice(ODD_WORDS)
    return separator.join(words)


def changed_value(rng: random.Random, value: Any) -> Any:
    """A structure with one place of it other, gone or new."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value, key=str))
        rest = {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return rest
        if rng.random() < 0.1:
            return {**value, rng.choice(ODD_WORDS): rng.choice(ODD_VALUES)}
        return {**rest, key: changed_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)


def changed_table(rng: random.Random, table: pa.Table) -> pa.Table:
    """A column of another type, with holes, gone, twice or under another name."""
    at = rng.randrange(table.num_columns)
    name, rows = table.column_names[at], table.num_rows
    columns: list[Any] = [
        pa.array([None] * rows),
        pa.array(rng.choices([math.nan, 1e300, -1.0, 0.5], k=rows)),
        pa.array(rng.choices([2**63 - 1, -(2**63), 0, None], k=rows), pa.int64()),
        pa.array(rng.choices([2**64 - 1, 0], k=rows), pa.uint64()),
        pa.array(rng.choices(["", "é", "x" * 999, None], k=rows)),
        pa.array(rng.choices([b"\xff\xfe", b""], k=rows)),
        pa.array(rng.choices([[], [1, None], None, [2**62]], k=rows), pa.list_(pa.int64())),
        pa.array(rng.choices([[[]], [[1]], None], k=rows)),
        pa.array(rng.choices([True, False, None], k=rows)),
        pa.array(rng.choices([{"a": 1}, None], k=rows)),
        pa.array(rng.choices([0, 10**15], k=rows), pa.timestamp("ns")),
        pa.array(rng.choices(["a", "b"], k=rows)).dictionary_encode(),
    ]
    match rng.randrange(5):
        case 0:
            return table.remove_column(at)
        case 1:
            return table.append_column(name, table.column(at))
        case 2:
            names = [rng.choice(ODD_WORDS) if n == name else n for n in table.column_names]
            return table.rename_columns(names)
        case 3 if rows:
            return table.slice(0, 0)
        case _:
            return table.set_column(at, name, rng.choice(columns))


# Readers: each makes an example from a random state, and reads it


def read_all(config: DataConfig) -> None:
    """What training and evaluation read, twice: shuffled, and in order."""
    for split in ("train", "test"):
        source = open_source(config, split)
        for ranks in (1, 2):
            for _ in source.batches(global_batch=8, rank=0, ranks=ranks, seed=0):
                pass


def parquet_bytes(table: pa.Table) -> bytes:
    """A file with checksums."""
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=6, write_page_checksum=True)
    return sink.getvalue()


def parquet(rng: random.Random, folder: Path) -> None:
    """Columns that types choose, or histories."""
    size = rng.choice([0, 1, 15])
    columns: dict[str, Any] = {
        "user": pa.array(range(size), pa.int64()),
        "tags": pa.array([list(range(i % 3)) for i in range(size)], pa.list_(pa.int64())),
        "x": pa.array([i / 7 for i in range(size)], pa.float64()),
        "label": pa.array([i % 2 for i in range(size)], pa.int8()),
    }
    if rng.random() < 0.4:
        columns = {
            "history": pa.array([[1, 2, 3 + i] for i in range(size)], pa.list_(pa.int64())),
            "timestamps": pa.array([[1, 2, 3] for _ in range(size)], pa.list_(pa.int64())),
        }
    table = pa.table(columns)
    for _ in range(rng.choice([0, 1, 2])):
        table = changed_table(rng, table) if table.num_columns else table
    data = parquet_bytes(table)
    (folder / "a.parquet").write_bytes(changed_bytes(rng, data) if rng.random() < 0.6 else data)
    held_out = rng.choice([0, 5])
    read_all(build(DataConfig, {"kind": "parquet", "path": str(folder), "test_every": held_out}))


def movielens(rng: random.Random, folder: Path) -> None:
    """Ratings in either form."""
    rows = [(u, i * 7 % 11, 1 + i % 5, u + i) for u in range(1, 6) for i in range(u + 2)]
    separator, name = rng.choice([("::", "ratings.dat"), (",", "ratings.csv")])
    head = "userId,movieId,rating,timestamp\n" if name.endswith("csv") else ""
    text = head + "".join(separator.join(map(str, row)) + "\n" for row in rows)
    (folder / name).write_bytes(changed_text(rng, text, separator[0]))
    use = {"use": rng.choice(["ratings", "sequences"]), "max_len": 4}
    given = {"kind": "movielens", "path": str(folder), "movielens": use}
    read_all(build(DataConfig, {**given, "max_broken": rng.choice([0, 100])}))


def kuairand_tables() -> dict[str, list[dict[str, Any]]]:
    """A few rows of each of its tables."""
    log = [
        {
            "user_id": i % 4,
            "video_id": i % 3,
            "date": 20220425 + i % 6 if i < 15 else 20220502,
            "hourmin": 1200,
            "time_ms": 1_650_900_000_000 + i,
            "long_view": i % 2,
            "duration_ms": 1000 * i,
            "play_time_ms": 77,
            "tab": i % 3,
        }
        for i in range(20)
    ]
    users = [
        {"user_id": u, **dict.fromkeys(USER_KEYS, "1"), **dict.fromkeys(USER_COUNTS, 10 * u)}
        for u in range(3)
    ]
    videos = [
        {
            "video_id": v,
            "author_id": 9,
            "video_type": "NORMAL",
            "upload_dt": "2022-04-10",
            "upload_type": "Web",
            "music_id": 5,
            "music_type": 9.0,
            "tag": "1,2",
        }
        for v in range(3)
    ]
    return {"log_standard": log, "user_features": users, "video_features_basic": videos}


def kuairand(rng: random.Random, folder: Path) -> None:
    """Its tables as CSV or Parquet, one of them changed."""
    tables = kuairand_tables()
    victim, as_parquet = rng.choice(sorted(tables)), rng.random() < 0.4
    for name, rows in tables.items():
        if as_parquet:
            table = pa.Table.from_pylist(rows)
            data = parquet_bytes(changed_table(rng, table) if name == victim else table)
            data = changed_bytes(rng, data) if name == victim and rng.random() < 0.3 else data
            (folder / f"{name}.parquet").write_bytes(data)
            continue
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        data = out.getvalue().encode()
        data = changed_text(rng, out.getvalue(), ",") if name == victim else data
        (folder / f"{name}.csv").write_bytes(data)
    given = {"kind": "kuairand", "path": str(folder), "max_broken": rng.choice([0, 100])}
    read_all(build(DataConfig, given))


def criteo(rng: random.Random, folder: Path) -> None:
    """Click logs, also zipped."""
    lines = [
        "\t".join([str(n % 2), *map(str, range(-1, 12)), *(f"{n * k:08x}" for k in range(26))])
        for n in range(12)
    ]
    data = changed_text(rng, "\n".join(lines) + "\n", "\t")
    if rng.random() < 0.3:
        packed = gzip.compress(data)
        packed = changed_bytes(rng, packed) if rng.random() < 0.5 else packed
        (folder / "day_0.gz").write_bytes(packed)
    else:
        (folder / "day_0.tsv").write_bytes(data)
    given = {"kind": "criteo", "path": str(folder), "max_broken": rng.choice([0, 100])}
    read_all(build(DataConfig, {**given, "test_every": rng.choice([0, 4])}))


def toml_of(value: dict[str, Any], where: str = "") -> str:
    """TOML of nested dicts, where JSON's scalars and lists are TOML's too."""
    text = f"[{where}]\n" if where else ""
    for key, one in value.items():
        if not isinstance(one, dict) and one is not None:
            text += f"{key} = {json.dumps(one)}\n"
    for key, one in value.items():
        if isinstance(one, dict):
            text += toml_of(one, f"{where}.{key}" if where else key)
    return text


USUAL_JOB = {key: value for key, value in asdict(JobConfig()).items() if isinstance(value, dict)}


def toml(rng: random.Random, folder: Path) -> None:
    """The config of a job."""
    value = USUAL_JOB
    for _ in range(rng.choice([1, 1, 2, 4])):
        changed = changed_value(rng, value)
        value = changed if isinstance(changed, dict) else value
    try:
        text = toml_of(json.loads(json.dumps(value, default=str)))
    except (ValueError, RecursionError):
        return
    data = changed_text(rng, text, "= ") if rng.random() < 0.4 else text.encode("utf-8", "replace")
    (folder / "job.toml").write_bytes(data)
    overrides = [f"run.batch={rng.choice(ODD_WORDS)}"] if rng.random() < 0.1 else []
    load(JobConfig, folder / "job.toml", overrides)


SCHEDULES = [to_text(plan(name, PlanOptions()).schedule(2)) for name in PLANS]


def schedule(rng: random.Random, folder: Path) -> None:
    """Schedules of every plan; the checker gets what parses."""
    del folder
    text = changed_text(rng, rng.choice(SCHEDULES), " ,:|").decode("utf-8", "replace")
    check(from_text(text))


RANKER = HstuConfig(blocks=1, heads=1, dim=4, attention_dim=4, value_dim=4, max_len=8)
WEIGHTS = {f"model.{name}": tensor for name, tensor in HstuRanker(RANKER).state_dict().items()}


def small_checkpoint(folder: Path) -> Path:
    """A ranker of a few weights."""
    return write_checkpoint(
        folder,
        Manifest(
            step=2,
            tables=({"name": "items", "dim": 4, "dtype": "float32"},),
            model={"kind": "ranker", "config": asdict(RANKER)},
            first_rows={"items": {"seed": 1, "std": 0.1}},
        ),
        WEIGHTS,
        {"items": (torch.arange(9), torch.ones(9, 5))},
    )


def manifest(rng: random.Random, folder: Path) -> None:
    """Most examples have a hash that agrees: what is behind it is read then."""
    path = small_checkpoint(folder) / MANIFEST
    if rng.random() < 0.2:
        path.write_bytes(changed_bytes(rng, path.read_bytes()))
    else:
        body = json.loads(path.read_text())
        del body["format"], body["hash"]
        for _ in range(rng.choice([1, 1, 2])):
            changed = changed_value(rng, body)
            body = changed if isinstance(changed, dict) else body
        text = {"format": FORMAT, "hash": hash_of_body(body), **body}
        path.write_text(json.dumps(text, indent=1) + "\n")
    if rng.random() < 0.5:
        newest(folder)
    read_weights(folder)


def tensors(rng: random.Random, folder: Path) -> None:
    """Files of tensors with a manifest that agrees, so that their own parser meets them."""
    from nestpipe.checkpoint.disk import hash_of, kind_of_new_files

    path = small_checkpoint(folder)
    body = json.loads((path / MANIFEST).read_text())
    del body["format"], body["hash"]
    victim = rng.choice(sorted(body["files"]))
    (path / victim).write_bytes(changed_bytes(rng, (path / victim).read_bytes()))
    now = hash_of(path / victim, kind_of_new_files())
    body["files"][victim] |= {"num_bytes": now.num_bytes, "hash": now.hash}
    text = {"format": FORMAT, "hash": hash_of_body(body), **body}
    (path / MANIFEST).write_text(json.dumps(text, indent=1) + "\n")
    read_weights(folder)


BODY = {
    "user": "u",
    "long": {"items": [1, 2, 3], "times": [1, 2, 3]},
    "short": {"items": [4], "times": [5]},
    "candidates": [5, 6],
    "time": 9,
    "deadline_ms": 50,
}


def http(rng: random.Random, folder: Path) -> None:
    """Bodies of `rank` and `prefetch`, as JSON and in binary."""
    del folder
    reader = RequestReader(ServeSettings(max_events=20, max_candidates=20), HttpSettings())
    headers = {"content-type": "application/json"}
    if rng.random() < 0.5:
        value = changed_value(rng, BODY)
        data = json.dumps(value).encode()
    else:
        headers = {"content-type": MEDIA_TYPE}
        counts = {"long": {"items": 3, "times": 3}, "short": {"items": 1, "times": 1}}
        header = {**BODY, **counts, "candidates": 2}
        header = changed_value(rng, header) if rng.random() < 0.7 else header
        arrays = [np.arange(rng.choice([10, 10, 10, 9, 0]), dtype=np.int64)]
        data = pack({"x": header} if not isinstance(header, dict) else header, arrays)
    if rng.random() < 0.4:
        data = changed_bytes(rng, data)
    if rng.random() < 0.3:
        name = rng.choice(["content-type", "x-user", "x-nestpipe-waited-ms"])
        headers[name] = rng.choice(ODD_WORDS)
    read = rng.choice([reader.ranking, reader.signal])
    read(bytearray(data), headers)


def histories(rng: random.Random, folder: Path) -> None:
    """Files of histories that `serve` reads."""
    if rng.random() < 0.5:
        table = pa.table({"user": ["a", "b"], "items": [[1, 2], [3]], "times": [[1, 2], [3]]})
        table = changed_table(rng, table) if rng.random() < 0.7 else table
        data = parquet_bytes(table)
        file = folder / "h.parquet"
    else:
        arrays: dict[str, Any] = {
            "users": np.array(["a", "b"]),
            "lengths": np.array([2, 1]),
            "items": np.array([1, 2, 3]),
            "times": np.array([1, 2, 3]),
        }
        odd = [np.array(x) for x in (1, 1.5, "x", [[1]], [], [-1, 4], [2**62, 2**62])]
        arrays[rng.choice(sorted(arrays))] = rng.choice(odd)
        sink = io.BytesIO()
        np.savez(sink, **arrays)
        data, file = sink.getvalue(), folder / "h.npz"
    file.write_bytes(changed_bytes(rng, data) if rng.random() < 0.4 else data)
    store = read_histories(file, 5)
    for user in ("a", "b", "c"):
        store.of(user)


Reader = Callable[[random.Random, Path], None]
READERS: dict[str, Reader] = {
    one.__name__: one
    for one in (
        *(parquet, movielens, kuairand, criteo),
        *(toml, schedule, manifest, tensors, http, histories),
    )
}


# Running


class HangError(Exception):
    """An example that takes too long."""


def complaint(name: str, seed: int, folder: Path) -> str | None:
    """Try one example; what is wrong with how the reader took it."""

    def give_up(*_: object) -> None:
        raise HangError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[name](random.Random(f"{name} {seed}"), folder)
    except ScheduleError as error:  # shows the schedule, too
        if not str(error).strip():
            return "it says nothing"
    except (NestpipeError, HttpError) as error:
        if "\n" in str(error).rstrip("\n") or not str(error).strip():
            return f"not one line: {error}"
    except HangError:
        return f"no answer in {HANG_S} s"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


def examples(name: str, first: int, last: float, until: float, report: Path) -> None:
    """Try one after the other; what is found is a line of the report."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    logging.disable()
    with tempfile.TemporaryDirectory() as scratch, report.open("a") as out:
        seed = first
        while time.monotonic() < until and seed <= last:
            folder = Path(scratch) / "example"
            folder.mkdir()
            out.write(json.dumps({"seed": seed}) + "\n")
            out.flush()
            found = complaint(name, seed, folder)
            if found:
                out.write(json.dumps({"seed": seed, "found": found}) + "\n")
                out.flush()
            shutil.rmtree(folder)
            seed += 1


def lines_of(report: Path) -> Iterator[dict[str, Any]]:
    """What was tried and found."""
    yield from (json.loads(line) for line in report.read_text().splitlines())


def _place(found: str) -> str:
    """The line of code and the kind of error: what two findings of one mistake have in common."""
    lines = found.strip().splitlines()
    files = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f"{files[-1] if files else ''} {lines[-1].partition(':')[0]}"


def fuzz(name: str, seconds: float, first: int = 0, most: float = math.inf) -> list[str]:
    """Fuzz one reader; sentences about what was found, one for each place in the code."""
    found: dict[str, str] = {}
    until, seed = time.monotonic() + seconds, first
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report"
        report.touch()
        while time.monotonic() < until and seed < first + most:
            pid = os.fork()
            if pid == 0:
                try:
                    examples(name, seed, first + most - 1, until, report)
                finally:
                    os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = list(lines_of(report))
            for one in said:
                if "found" in one:
                    place = _place(one["found"])
                    found.setdefault(place, f"{name} --seed {one['seed']}: {one['found']}")
            seed = said[-1]["seed"] + 1 if said else seed + 1
            if status != 0:
                found[f"ended with {status}"] = f"{name} --seed {seed - 1}: ended with {status}"
    print(f"{name}: {seed - first:,} examples, {len(found)} findings", flush=True)
    return list(found.values())


def main() -> int:
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reader", default="all", choices=["all", *READERS])
    parser.add_argument("--seconds", type=float, default=600.0, help="for each reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--seed", type=int, help="this example alone, with what it raises")
    given = parser.parse_args()
    chosen = list(READERS) if given.reader == "all" else [given.reader]
    if given.seed is not None:
        with tempfile.TemporaryDirectory() as scratch:
            print(complaint(given.reader, given.seed, Path(scratch)) or "fine")
        return 0
    found = [one for name in chosen for one in fuzz(name, given.seconds, given.first)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
