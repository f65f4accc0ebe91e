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
from nestpipe.sim.costs import Costs, Scale, costs
from nestpipe.sim.fit import FittedCosts, fit
from nestpipe.sim.paper import PaperRow, paper_rows, rows_as_json
from nestpipe.sim.replay import Replay, replay
from nestpipe.sim.report import Figures, figures, simulate
from nestpipe.sim.scaling import Point, curve_as_json, scaling_curve

__all__ = [
    "Cluster",
    "Compute",
    "Costs",
    "Figures",
    "FittedCosts",
    "Host",
    "Network",
    "PaperRow",
    "Point",
    "Replay",
    "Scale",
    "Stragglers",
    "Workload",
    "chart",
    "costs",
    "curve_as_json",
    "figures",
    "fit",
    "paper_cluster",
    "paper_rows",
    "replay",
    "rows_as_json",
    "scaling_curve",
    "shards_of",
    "simulate",
    "to_toml",
]
