"""Chooses settings for a job: before it runs, while it runs, and for machines not bought yet."""

from nestpipe.planner.adaptive import AdaptiveRun, Choice, replay_choices
from nestpipe.planner.choice import (
    Candidate,
    HardwarePredictor,
    PlanChoice,
    Predicted,
    ProfilePredictor,
    Search,
    checked,
    choose,
    config_text,
)
from nestpipe.planner.profile import (
    JobBench,
    candidate_of,
    check_candidates,
    job_bench,
    profile_job,
    run_off,
    thought,
)

__all__ = [
    "AdaptiveRun",
    "Candidate",
    "Choice",
    "HardwarePredictor",
    "JobBench",
    "PlanChoice",
    "Predicted",
    "ProfilePredictor",
    "Search",
    "candidate_of",
    "check_candidates",
    "checked",
    "choose",
    "config_text",
    "job_bench",
    "profile_job",
    "replay_choices",
    "run_off",
    "thought",
]
