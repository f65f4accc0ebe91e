"""Simulate training on a cluster that you do not have, before you rent it.

    python examples/06_simulate_your_cluster.py

The simulator replays the very schedule that training runs, with costs from the sizes of the work
and the speed of the hardware. It needs no torch. Every figure is simulated: what comes out is as
good as the numbers below. `nestpipe simulate --from-trace` takes costs from a measured run instead.
"""

from nestpipe.schedule import PlanOptions, plan
from nestpipe.sim import Cluster, Compute, Host, Network, Scale, Workload, scaling_curve

cluster = Cluster(
    compute=Compute(tflops=250.0),  # sustained by dense forward and backward, not the data sheet's
    host=Host(gather_gb_per_s=20.0, scatter_gb_per_s=20.0),
    # 400 Gbit/s for eight workers of a node; shared switches get slower with the number of peers.
    network=Network(gb_per_s=6.25, node_gb_per_s=300.0, contention=(5e-4,)),
    workload=Workload(
        samples=512,
        keys_per_sample=1500,
        unique_share=0.3,
        dim=128,
        gflop_per_sample=60.0,
        dense_mb=50.0,
    ),
)
scales = [Scale(workers) for workers in (8, 64, 256)]

print("simulated: ms per step, and the share of it that computes")
print(f"{'workers':12}" + "".join(f"{scale.workers:>12}" for scale in scales))
for name in ("serial", "dual_buffer", "nested"):
    curve = scaling_curve(plan(name, PlanOptions(micro_batches=4)), cluster, scales, batches=16)
    steps = [f"{point.figures.step_ms:.0f} ({point.figures.utilisation:.0%})" for point in curve]
    print(f"{name:12}" + "".join(f"{step:>12}" for step in steps))

# What would have to get faster for `nested` at the largest scale?
print(f"busiest lane of nested at {scales[-1].workers} workers: {curve[-1].figures.busiest_lane}")
