"""What a run tells of itself while it goes on: a record on disk, a page, and metrics; no torch."""
