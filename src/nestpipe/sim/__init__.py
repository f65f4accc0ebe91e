"""Replays schedules on thousands of workers with a cost model; never imports torch."""

from nestpipe.sim.cluster import (
    Cluster,
    Compute,
    Host,
    Network,
    Stragglers,
    Workload,
    shards_of,
    to_toml,
)
from nestpipe.sim.costs import Costs, Layout, Scale, costs
from nestpipe.sim.paper import (
    PaperChoice,
    PaperRow,
    paper_choices,
    paper_cluster,
    paper_rows,
    rows_as_json,
)
from nestpipe.sim.replay import Replay, replay
from nestpipe.sim.report import (
    Figures,
    GroupChoice,
    GroupRow,
    Point,
    chart,
    choice_as_json,
    choose_groups,
    curve_as_json,
    figures,
    scaling_curve,
    simulate,
    usual_groups,
)
from nestpipe.sim.trace_costs import FittedCosts, fit

__all__ = [
    "Cluster",
    "Compute",
    "Costs",
    "Figures",
    "FittedCosts",
    "GroupChoice",
    "GroupRow",
    "Host",
    "Layout",
    "Network",
    "PaperChoice",
    "PaperRow",
    "Point",
    "Replay",
    "Scale",
    "Stragglers",
    "Workload",
    "chart",
    "choice_as_json",
    "choose_groups",
    "costs",
    "curve_as_json",
    "figures",
    "fit",
    "paper_choices",
    "paper_cluster",
    "paper_rows",
    "replay",
    "rows_as_json",
    "scaling_curve",
    "shards_of",
    "simulate",
    "to_toml",
    "usual_groups",
]
