"""Spans and traces, and every way to look at them; knows nothing of schedules or torch."""

from nestpipe.trace.draw import grid
from nestpipe.trace.export import read_chrome, svg, to_chrome, write_chrome
from nestpipe.trace.span import (
    IDLE,
    LANES,
    USEFUL,
    Exposure,
    Fact,
    ShortTraceError,
    Span,
    Trace,
    exposure,
    lane_busy,
    steady_interval,
)

__all__ = [
    "IDLE",
    "LANES",
    "USEFUL",
    "Exposure",
    "Fact",
    "ShortTraceError",
    "Span",
    "Trace",
    "exposure",
    "grid",
    "lane_busy",
    "read_chrome",
    "steady_interval",
    "svg",
    "to_chrome",
    "write_chrome",
]
