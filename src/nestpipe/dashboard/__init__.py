"""A run while it goes on: its record on disk, a page that shows it, and metrics; no torch."""
