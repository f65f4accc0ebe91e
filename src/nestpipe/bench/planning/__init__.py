"""Planner and simulator beside what really runs."""
