"""Replays schedules on thousands of workers with a cost model; never imports torch."""

from nestpipe.sim.calibrate import paper_cluster
from nestpipe.sim.chart import chart
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
from nestpipe.sim.fit import FittedCosts, fit
from nestpipe.sim.groups import GroupChoice, GroupRow, choice_as_json, choose_groups, usual_groups
from nestpipe.sim.paper import PaperChoice, PaperRow, paper_choices, paper_rows, rows_as_json
from nestpipe.sim.replay import Replay, replay
from nestpipe.sim.report import Figures, figures, simulate
from nestpipe.sim.scaling import Point, curve_as_json, scaling_curve

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
