"""Drawings of a trace: a text grid and an SVG."""
