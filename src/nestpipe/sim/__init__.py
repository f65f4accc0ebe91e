"""Replays schedules on thousands of workers with a cost model."""
