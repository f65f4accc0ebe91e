"""Traces as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from nestpipe.deprecated import current_word
from nestpipe.errors import ConfigError, ParseError
from nestpipe.trace.draw import lane_order, sublines
from nestpipe.trace.span import Fact, Span, Trace

Event = dict[str, object]
Thread = tuple[str, int]

_LARGEST = sys.float_info.max


def to_chrome(trace: Trace) -> dict[str, object]:
    """One process per rank and one thread per lane; the args hold the exact milliseconds."""
    names: list[Event] = []
    tids: dict[int, dict[Thread, int]] = {}
    threads: list[Thread] = [("", 0)] * len(trace.spans)
    for rank in trace.ranks:
        places = [i for i, span in enumerate(trace.spans) if span.rank == rank]
        lines = sublines([trace.spans[i] for i in places])
        for place, line in zip(places, lines, strict=True):
            threads[place] = (trace.spans[place].lane, line)
        tids[rank] = _thread_ids({threads[i] for i in places})
        names += _names(rank, tids[rank])
    ops = [
        _event(span, tids[span.rank][thread])
        for span, thread in zip(trace.spans, threads, strict=True)
    ]
    return {
        "traceEvents": names + ops,
        "displayTimeUnit": "ms",
        "otherData": dict(trace.facts),
    }


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as a JSON file."""
    try:
        Path(path).write_text(json.dumps(to_chrome(trace)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the trace to '{path}': {error.strerror};"
            " name a file in an existing folder"
        ) from error


def read_chrome(path: str | os.PathLike[str]) -> Trace:
    """The trace that `write_chrome` wrote; events of other tools in the file are passed over."""
    document = _load(path)
    facts: dict[str, Fact] = {}
    if isinstance(document, dict):
        table = cast("dict[str, object]", document)
        facts = _facts(table.get("otherData"))
        document = table.get("traceEvents")
    if not isinstance(document, list):
        raise ParseError(
            f"'{path}' is JSON but holds no list of trace events; give a file that"
            " `write_chrome` wrote"
        )
    events = cast("list[object]", document)
    spans = [_span(event, f"event {n} of '{path}'") for n, event in enumerate(events)]
    found = tuple(span for span in spans if span is not None)
    if not found:
        raise ParseError(
            f"none of the {len(events)} events of '{path}' is a nestpipe op; give a trace that"
            " nestpipe wrote"
        )
    return Trace(found, facts)


def _thread_ids(threads: set[Thread]) -> dict[Thread, int]:
    # A viewer misdraws ops that overlap within one thread, so each sub-line gets its own.
    place = {lane: n for n, lane in enumerate(lane_order(lane for lane, _ in threads))}
    ordered = sorted(threads, key=lambda thread: (place[thread[0]], thread[1]))
    return {thread: n for n, thread in enumerate(ordered, start=1)}


def _names(rank: int, tids: Mapping[Thread, int]) -> list[Event]:
    def named(what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}

    events = [
        named("process_name", 0, name=f"rank {rank}"),
        named("process_sort_index", 0, sort_index=rank),
    ]
    for (lane, line), tid in tids.items():
        name = lane if line == 0 else f"{lane} ({line + 1})"
        events.append(named("thread_name", tid, name=name))
        events.append(named("thread_sort_index", tid, sort_index=tid))
    return events


def _event(span: Span, tid: int) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": tid,
        "ts": span.start * 1000,
        "dur": span.duration * 1000,
        "args": {
            "kind": span.kind,
            "lane": span.lane,
            "batch": span.batch,
            "micro": span.micro,
            # Microseconds would round: these two are read back instead of ts and dur.
            "start_ms": span.start,
            "end_ms": span.end,
        },
    }


def _load(path: str | os.PathLike[str]) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ParseError(
            f"cannot read the trace '{path}': {error.strerror}; give the path of a trace file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ParseError(
            f"'{path}' is not JSON ({error}); give a file that `write_chrome` wrote"
        ) from error


def _facts(stored: object) -> dict[str, Fact]:
    if not isinstance(stored, dict):
        return {}
    table = cast("dict[str, object]", stored)
    known = {name: value for name, value in table.items() if isinstance(value, str | int | float)}
    return {current_word(name): value for name, value in known.items()}


def _span(event: object, where: str) -> Span | None:
    """The event as a span, or None where another tool wrote it."""
    if not isinstance(event, dict):
        raise ParseError(f"{where} is {event!r:.40}, not an object; remove it or write it anew")
    fields = cast("dict[str, object]", event)
    stored = fields.get("args")
    args = cast("dict[str, object]", stored) if isinstance(stored, dict) else {}
    kind, lane = args.get("kind"), args.get("lane")
    if fields.get("ph") != "X" or not isinstance(kind, str) or not isinstance(lane, str):
        return None
    start, end = _times(fields, args, where)
    micro = args.get("micro")
    return Span(
        kind=kind,
        lane=lane,
        batch=_whole(args.get("batch"), "batch", where),
        micro=None if micro is None else _whole(micro, "micro", where),
        rank=_whole(fields.get("pid"), "pid", where),
        start=start,
        end=end,
    )


def _times(fields: Event, args: Event, where: str) -> tuple[float, float]:
    if "start_ms" in args or "end_ms" in args:
        start = _finite(args.get("start_ms"), "start_ms", where)
        end = _finite(args.get("end_ms"), "end_ms", where)
    else:
        start = _finite(fields.get("ts"), "ts", where) / 1000
        end = start + _finite(fields.get("dur"), "dur", where) / 1000
    if end < start:
        raise ParseError(f"{where} ends at {end} ms before it starts at {start} ms; trace it anew")
    return start, end


def _finite(value: object, name: str, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return value
    raise ParseError(f"{where} has {name} {value!r:.40}; it must be a finite number")


def _whole(value: object, name: str, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ParseError(f"{where} has {name} {value!r:.40}; it must be a whole number")
