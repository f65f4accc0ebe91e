"""Spans and traces, and every way to look at them; knows nothing of schedules or torch."""

from nestpipe.trace.span import LANES, Fact, Span, Trace

__all__ = ["LANES", "Fact", "Span", "Trace"]
