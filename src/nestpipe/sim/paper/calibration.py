"""From published figures to a `Cluster`: few knobs, each solved from a named figure.

Calibrated on TorchRec (compute, lookup at two scales), UniEmb (All2All at three scales, the cost
of a hand-over) and 2D-SP (the lookup it saves). Of NestPipe the bound on the refresh is taken and
its number of micro-batches is inferred, and of NestPipe + 2D-SP its raw All2All is used (how much a
smaller group helps). Their steps, and those of the ablations, are predictions but for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nestpipe.schedule import PlanOptions, plan
from nestpipe.schedule.op import Kind
from nestpipe.schedule.schedule import Shape
from nestpipe.sim.cluster import Cluster, Compute, Host, Network, Workload
from nestpipe.sim.costs import Layout, Scale, all_to_all_ms, costs, message_ms
from nestpipe.sim.paper import published as paper
from nestpipe.sim.paper.published import PUBLISHED

K = Kind
GROUPS = 8
"""Groups of 2D-SP: not published; eight is the most that its layout inside a node allows."""
LAYOUT = Layout.SHARDS
"""The layout of 2D-SP was not published either: this one comes closer to its All2All at 128
workers, where half of a group is in one node."""
HOST_SPLIT = {K.PREFETCH: 0.25, K.COPY: 0.15, K.RETRIEVE: 0.40, K.WRITEBACK: 0.20}
"""How the host's part of lookup splits into ops: assumed, only the sum is published."""
ASSUMED = Cluster(
    compute=Compute(tflops=128.0, mkeys_per_s=100.0, memory_gb_per_s=800.0),
    network=Network(node_gb_per_s=200.0, message_us=20.0, message_us_per_peer=0.2),
    workload=Workload(merge_from_host=0.0),  # see UNRECONCILED
)
"""Sizes and speeds that no figure fixes; only their products with the knobs below matter."""


OTHER_HOST_SPLIT = {K.PREFETCH: 0.35, K.COPY: 0.25, K.RETRIEVE: 0.25, K.WRITEBACK: 0.15}
"""Another split that fits all that was published: it matters only past 1,536 workers."""
CURVE_SCALES = (128, 512, 1536)
"""Where the All2All of UniEmb is known."""


def paper_cluster(
    host_split: Mapping[Kind, float] | None = None, *, contention_terms: int = 2
) -> Cluster:
    """The 1,536-NPU cluster of the paper, calibrated.

    With one contention term instead of two the network follows the line through 512 and 1,536
    workers: another way to extend its curve past them.
    """
    network = _network_curve(CURVE_SCALES[-(contention_terms + 1) :])
    cluster = replace(ASSUMED, compute=_compute(), network=network)
    cluster = replace(cluster, network=_group_relief(cluster))
    cluster = replace(cluster, network=_key_exchange(cluster))
    cluster = replace(cluster, host=_host(cluster, host_split or HOST_SPLIT))
    return replace(cluster, workload=_dense_work(cluster))


def _figure(system: str, workers: int, name: str) -> float:
    value = getattr(PUBLISHED[system, workers], name)
    assert value is not None, f"{name} of {system} at {workers} is not known"
    return value


def compute_ms() -> float:
    """TorchRec's step less its lookup and communication: nothing overlaps there."""
    return (
        _figure(paper.TORCHREC, 1536, "step_ms")
        - _figure(paper.TORCHREC, 1536, "lookup_ms")
        - _figure(paper.TORCHREC, 1536, "exposed_comm_ms")
    )


def _compute() -> Compute:
    """UniEmb's remaining lookup is the hand-over; the refresh adds its published bound."""
    work = ASSUMED.workload
    refreshed = 2 * work.owned_rows * work.shared_share * work.stored_row_bytes
    return replace(
        ASSUMED.compute,
        swap_ms=_figure(paper.UNIEMB, 1536, "lookup_ms"),
        memory_gb_per_s=refreshed / paper.REFRESH_MS / 1e6,
    )


def exchange_ms(workers: int) -> float:
    """Rows and gradients of one UniEmb step: what its step leaves besides compute and hand-over."""
    base = _figure(paper.UNIEMB, 1536, "step_ms") * _figure(
        paper.UNIEMB, 1536, "scaling_efficiency"
    )
    step = base / _figure(paper.UNIEMB, workers, "scaling_efficiency")
    return step - compute_ms() - _figure(paper.UNIEMB, 1536, "lookup_ms")


def _network_curve(scales: Sequence[int]) -> Network:
    """Bandwidth and contention from the All2All at these scales, a term for each but the first."""
    assumed = ASSUMED.network
    work = ASSUMED.workload
    one_way = work.unique_keys * work.row_bytes
    near_only = replace(assumed, gb_per_s=float("inf"))
    far_ms: list[float] = []
    for workers in scales:
        reduction = message_ms(assumed, workers)
        rest = 2 * all_to_all_ms(near_only, one_way, Scale(workers)) + reduction
        far_ms.append((exchange_ms(workers) - rest) / 2)
    inside = assumed.workers_per_node
    powers = np.array([[(w - inside) / w * w**p for p in range(len(scales))] for w in scales])
    per_byte = np.linalg.solve(powers, np.array(far_ms) / one_way)
    first, *rest_terms = (float(x) for x in per_byte)
    return replace(
        assumed,
        gb_per_s=1 / first / 1e6,
        contention=tuple(term / first for term in rest_terms),
    )


def _group_relief(cluster: Cluster) -> Network:
    """How far smaller groups cut contention, from the raw All2All of 2D-SP under NestPipe."""
    target = _figure(paper.NESTPIPE_2D, 1536, "all_to_all_ms")
    shape = plan("nested", PlanOptions(micro_batches=paper.MICROS)).shape

    def all_to_all(relief: float) -> float:
        network = replace(cluster.network, group_relief=relief)
        at = costs(replace(cluster, network=network), shape, Scale(1536, GROUPS, LAYOUT))
        return paper.MICROS * (at[K.ROWS] + at[K.GRADS])

    return replace(cluster.network, group_relief=_solve_falling(all_to_all, target))


def _key_exchange(cluster: Cluster) -> Network:
    """Setting up the key exchange, from the lookup that 2D-SP saves at 1,536 workers.

    Of all of lookup only the key exchange stays inside a group, so the saving is its.
    """
    saved = _figure(paper.TORCHREC, 1536, "lookup_ms") - (
        _figure(paper.SP_2D, 1536, "step_ms")
        - _figure(paper.SP_2D, 1536, "exposed_comm_ms")
        - compute_ms()
    )

    def not_saved(setup_us: float) -> float:
        network = replace(cluster.network, setup_us_per_peer=setup_us)
        with_setup = replace(cluster, network=network)
        alone = costs(with_setup, _serial_shape(), Scale(1536))
        grouped = costs(with_setup, _serial_shape(), Scale(1536, GROUPS, LAYOUT))
        return -sum(alone[kind] - grouped[kind] for kind in (K.COUNTS, K.KEYS))

    setup = _solve_falling(not_saved, -saved, high=1000.0)
    return replace(cluster.network, setup_us_per_peer=setup)


def _host(cluster: Cluster, split: Mapping[Kind, float]) -> Host:
    """Host speeds and their contention, from TorchRec's lookup at 128 and 1,536 workers."""
    base_step = _figure(paper.TORCHREC, 1536, "step_ms") * (
        _figure(paper.TORCHREC, 1536, "scaling_efficiency") / 100
    )
    lookup = {
        128: paper.LOOKUP_SHARE_AT_BASE * base_step,
        1536: _figure(paper.TORCHREC, 1536, "lookup_ms"),
    }
    host_ms: dict[int, float] = {}
    for workers, total in lookup.items():
        at = costs(cluster, _serial_shape(), Scale(workers))
        host_ms[workers] = total - sum(at[k] for k in (K.DEDUP, K.COUNTS, K.KEYS, K.UNION))
    slope = (host_ms[1536] - host_ms[128]) / (1536 - 128)
    alone = host_ms[128] - slope * 128
    work = cluster.workload
    row_bytes = work.owned_rows * work.stored_row_bytes
    return Host(
        samples_per_s=1000 * work.samples / (alone * split[K.PREFETCH]),
        pcie_gb_per_s=work.samples * work.sample_kb * 1024 / (alone * split[K.COPY]) / 1e6,
        gather_gb_per_s=row_bytes / (alone * split[K.RETRIEVE]) / 1e6,
        scatter_gb_per_s=row_bytes / (alone * split[K.WRITEBACK]) / 1e6,
        contention_per_worker=slope / alone,
    )


def _dense_work(cluster: Cluster) -> Workload:
    update = costs(cluster, _serial_shape(), Scale(1))[K.UPDATE]
    gflop = (compute_ms() - update) * cluster.compute.tflops / cluster.workload.samples
    return replace(cluster.workload, gflop_per_sample=gflop)


def _serial_shape() -> Shape:
    return plan("serial", PlanOptions()).shape


def _solve_falling(
    function: Callable[[float], float], target: float, low: float = 0.0, high: float = 1.0
) -> float:
    """Where a falling function meets the target, by halving."""
    for _ in range(100):
        middle = (low + high) / 2
        if function(middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
