"""Row optimizers against their dense twins in torch.optim, on the rows touched."""

import numpy as np
import pytest
import torch

from nestpipe.embedding.optimizers import OPTIMIZERS, root, row_optimizer, touch_scales
from nestpipe.errors import ConfigError

ROWS, DIM, STEPS = 12, 5, 6
CONSTANT, BY_TOUCH = "momentum_scaled_rowwise_adagrad", "touch_scaled_rowwise_adagrad"


def rowwise_adagrad(weight, gradients, lr, eps, scale=1.0, merges=None):
    """The ten-line reference: one accumulator per row, the mean of the squared gradient.

    With `merges`, each row is scaled by how many groups touch it, as told after every step.
    """
    sums, beyond_one = torch.zeros(ROWS), torch.zeros(ROWS)
    for step, (touched, gradient) in enumerate(gradients):
        for row, g in zip(touched.tolist(), gradient, strict=True):
            c = min(max(scale / (1 + float(beyond_one[row])), 1.0), scale)
            sums[row] += (g * g).mean()
            weight[row] -= lr * g / ((sums[row] / c).sqrt() + eps)
        if merges is not None:
            for row, groups in zip(touched.tolist(), merges[step].tolist(), strict=True):
                beyond_one[row] += (groups - 1 - beyond_one[row]) / 4
    return weight


class LazyAdamW:
    """`torch.optim.AdamW` on a table, of which only touched rows and their moments are kept."""

    def __init__(self, parameter, lr, eps, betas=(0.9, 0.999), weight_decay=0.0):
        self.parameter = parameter
        self.of_torch = torch.optim.AdamW(
            [parameter], lr=lr, eps=eps, betas=betas, weight_decay=weight_decay
        )

    def step(self):
        state = self.of_torch.state[self.parameter]
        idle = ~self.parameter.grad.ne(0).any(1)
        kept = [self.parameter.detach().clone(), *(state[n].clone() for n in MOMENTS if n in state)]
        self.of_torch.step()
        now = [self.parameter.detach(), *(state[n] for n in MOMENTS)]
        for before, after in zip(kept, now, strict=False):
            after[idle] = before[idle]
        if len(kept) == 1:
            for moment in now[1:]:
                moment[idle] = 0


MOMENTS = ("exp_avg", "exp_avg_sq")


def torch_twin(name, weight, gradients, lr, eps):
    parameter = torch.nn.Parameter(weight)
    optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=lr),
        "adagrad": lambda: torch.optim.Adagrad([parameter], lr=lr, eps=eps),
        "adam": lambda: torch.optim.SparseAdam([parameter], lr=lr, eps=eps),
        "adamw": lambda: LazyAdamW(parameter, lr, eps),
    }[name]()
    for touched, gradient in gradients:
        indices = touched[None]
        parameter.grad = torch.sparse_coo_tensor(
            indices, gradient, weight.shape, check_invariants=True
        )
        parameter.grad = parameter.grad if name == "adam" else parameter.grad.to_dense()
        optimizer.step()
    return parameter.detach()


def with_state(weight, optimizer):
    """Rows as they are before their first update."""
    rows, dim = weight.shape
    return torch.cat([weight, torch.zeros(rows, optimizer.state_dim(dim))], 1)


def draw_steps(generator):
    """First weights, then which rows each step touches and their gradients."""
    weight = torch.randn(ROWS, DIM, generator=generator)
    gradients = [
        (torch.randperm(ROWS, generator=generator)[:7], torch.randn(7, DIM, generator=generator))
        for _ in range(STEPS)
    ]
    return weight, gradients


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_optimizer_equals_its_dense_twin(name):
    weight, gradients = draw_steps(torch.Generator().manual_seed(1))
    optimizer = row_optimizer(name, lr=0.1, eps=1e-6, scale=3.0)
    rows = with_state(weight, optimizer)
    for step, (touched, gradient) in enumerate(gradients, start=1):
        buffer = rows[touched]
        optimizer.update(buffer, gradient, step)
        rows[touched] = buffer
    if name.endswith("rowwise_adagrad"):
        scale = 1.0 if name == "rowwise_adagrad" else 3.0
        expected = rowwise_adagrad(weight.clone(), gradients, 0.1, 1e-6, scale)
    else:
        expected = torch_twin(name, weight.clone(), gradients, 0.1, 1e-6)
    torch.testing.assert_close(rows[:, :DIM], expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_adamw_on_rows_is_that_of_torch(betas):
    weight, gradients = draw_steps(torch.Generator().manual_seed(4))
    optimizer = row_optimizer("adamw", lr=0.1, eps=1e-3, betas=betas, weight_decay=0.3)
    rows = with_state(weight, optimizer)
    parameter = torch.nn.Parameter(weight.clone())
    twin = LazyAdamW(parameter, 0.1, 1e-3, betas, 0.3)
    for step, (touched, gradient) in enumerate(gradients, start=1):
        buffer = rows[touched]
        optimizer.update(buffer, gradient, step)
        rows[touched] = buffer
        parameter.grad = torch.zeros(ROWS, DIM).index_copy(0, touched, gradient)
        twin.step()
    torch.testing.assert_close(rows[:, :DIM], parameter.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_decoupled_and_has_the_rate_of_its_step(name):
    """A step with decay is one without, on weights that have decayed before."""
    weight, gradients = draw_steps(torch.Generator().manual_seed(8))
    given = {"lr": 0.1, "scale": 2.0, "schedule": lambda step: 1 / step}
    decaying, plain = row_optimizer(name, weight_decay=0.4, **given), row_optimizer(name, **given)
    rows, expected = with_state(weight, plain)[:7], with_state(weight, plain)[:7]
    for step, (_, gradient) in enumerate(gradients, start=1):
        expected[:, :DIM] *= 1 - 0.1 / step * 0.4
        plain.update(expected, gradient, step)
        decaying.update(rows, gradient, step)
        assert torch.equal(rows, expected)


def test_a_schedule_multiplies_the_rate_of_its_step():
    weight, gradients = draw_steps(torch.Generator().manual_seed(9))
    scheduled = row_optimizer("sgd", lr=0.1, schedule=lambda step: 1 / step)
    rows, expected = weight[:7].clone(), weight[:7].clone()
    for step, (_, gradient) in enumerate(gradients, start=1):
        scheduled.update(rows, gradient, step)
        row_optimizer("sgd", lr=0.1 / step).update(expected, gradient, step)
        assert torch.equal(rows, expected)


def test_rows_scaled_by_touch_equal_their_twin_through_merges():
    generator = torch.Generator().manual_seed(2)
    weight, gradients = draw_steps(generator)
    merges = [torch.randint(1, 5, (7,), generator=generator) for _ in gradients]
    optimizer = row_optimizer(BY_TOUCH, lr=0.1, eps=1e-6, scale=4.0)
    rows = with_state(weight, optimizer)
    for step, ((touched, gradient), groups) in enumerate(zip(gradients, merges, strict=True), 1):
        buffer = rows[touched]
        optimizer.update(buffer, gradient, step)
        optimizer.count_groups(buffer, DIM, groups)
        rows[touched] = buffer
    expected = rowwise_adagrad(weight.clone(), gradients, 0.1, 1e-6, 4.0, merges)
    torch.testing.assert_close(rows[:, :DIM], expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *(("sgd", 0), ("adagrad", 8), ("rowwise_adagrad", 1), ("adam", 16)),
        *((CONSTANT, 1), (BY_TOUCH, 2), ("adamw", 16)),
    ],
)
def test_state_is_part_of_the_row(name, state):
    assert row_optimizer(name).state_dim(8) == state


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ConfigError, match="unknown row optimizer 'lion'"):
        row_optimizer("lion")


def test_roots_are_rounded_as_ieee_says():
    bits = torch.randint(0, 0x7F800000, (1 << 20,), generator=torch.Generator().manual_seed(0))
    numbers = bits.to(torch.int32).view(torch.float32)
    assert torch.equal(root(numbers), torch.from_numpy(np.sqrt(numbers.numpy())))


@pytest.mark.parametrize("scale", [0.999, 0.0, -4.0, float("nan"), float("inf")])
def test_a_scale_below_one_or_without_end_is_refused(scale):
    with pytest.raises(ConfigError, match=f"scale of the row optimizer is {scale}; give 1 or more"):
        row_optimizer(CONSTANT, scale=scale)


@pytest.mark.parametrize("scale", [2.0, 4.0, 8.0, 7.3])
def test_a_constant_scale_is_another_rate_and_eps(scale):
    """After 200 steps within 1e-6 of the way that a weight has gone, there and back."""
    rng = torch.Generator().manual_seed(3)
    scaled = row_optimizer(CONSTANT, lr=0.1, eps=1e-3, scale=scale)
    other = row_optimizer("rowwise_adagrad", lr=0.1 * scale**0.5, eps=1e-3 * scale**0.5)
    unscaled = row_optimizer("rowwise_adagrad", lr=0.1, eps=1e-3)
    rows = {one: with_state(torch.zeros(40, 16), one) for one in (scaled, other, unscaled)}
    way = torch.zeros(40, 16)
    sizes = 10.0 ** torch.randint(-4, 3, (40, 1), generator=rng)  # eps matters, or hardly
    for step in range(1, 201):
        gradients = torch.randn(40, 16, generator=rng) * sizes
        before = rows[scaled][:, :16].clone()
        for optimizer, of_optimizer in rows.items():
            optimizer.update(of_optimizer, gradients, step)
        way += (rows[scaled][:, :16] - before).abs()
    assert torch.equal(rows[scaled][:, 16], rows[other][:, 16]), "what is summed is not scaled"
    difference = (rows[scaled] - rows[other])[:, :16].abs()
    assert (difference <= 1e-6 * way).all(), float((difference / way).max())
    assert ((rows[scaled] - rows[unscaled])[:, :16].abs() > 1e-2 * way).any(), "c is in use"


@pytest.mark.parametrize(("beyond_one", "constant"), [(0.0, 5.0), (4.0, 1.0), (9.0, 1.0)])
def test_rows_that_one_group_or_all_touch_have_the_bits_of_a_constant(beyond_one, constant):
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(30, 8, generator=rng)
    by_touch = row_optimizer(BY_TOUCH, scale=5.0)
    fixed = row_optimizer(CONSTANT, scale=constant)
    touched, expected = with_state(weight, by_touch), with_state(weight, fixed)
    touched[:, 9] = beyond_one
    for step in range(1, 6):
        gradients = torch.randn(30, 8, generator=rng)
        by_touch.update(touched, gradients, step)
        fixed.update(expected, gradients, step)
        assert torch.equal(touched[:, :9], expected)
    assert (touched[:, 9] == beyond_one).all(), "an update counts no groups"


@pytest.mark.parametrize("scale", [1.0, 2.0, 7.3, 64.0])
def test_the_scale_of_a_row_stays_between_one_and_the_whole(scale):
    beyond_one = torch.linspace(0, 2 * scale, 1001)[:, None]
    scales = touch_scales(beyond_one, scale)
    largest = float(torch.tensor(scale))
    assert float(scales.max()) == float(scales[0]) == largest
    assert float(scales.min()) == 1.0
    assert (scales.diff(dim=0) <= 0).all(), "more groups, a smaller scale"


def test_groups_are_averaged_over_merges_with_a_quarter_for_the_last():
    optimizer = row_optimizer(BY_TOUCH, scale=4.0)
    rows = with_state(torch.ones(3, 2), optimizer)
    rows[:, 2] = 7.0
    counts = ([1, 4, 2], [1, 4, 1], [4, 4, 1])
    means = ([0, 0.75, 0.25], [0, 1.3125, 0.1875], [0.75, 1.734375, 0.140625])
    for groups, mean in zip(counts, means, strict=True):
        optimizer.count_groups(rows, 2, torch.tensor(groups))
        assert rows[:, 3].tolist() == mean
    assert (rows[:, :2] == 1).all()
    assert (rows[:, 2] == 7).all()
    assert optimizer.counts_groups


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != BY_TOUCH])
def test_other_optimizers_count_no_groups(name):
    optimizer = row_optimizer(name, scale=4.0)
    rows = torch.rand(3, 4 + optimizer.state_dim(4), generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    optimizer.count_groups(rows, 4, torch.tensor([1, 2, 4]))
    assert torch.equal(rows, before)
    assert not optimizer.counts_groups


def train_in_groups(optimizer, gradients, groups, touching, moment, beyond_one=0.0):
    """The weights of an old row that some groups touch and agree on.

    A group's gradient is the mean over its own samples: the whole one times all groups over those
    that touch the row. Weights and state are averaged over all groups after every step.
    """
    dim = gradients.shape[1]
    row = with_state(torch.zeros(1, dim), optimizer)
    row[:, dim] = moment
    row[:, dim + 1 :] = beyond_one
    for step, gradient in enumerate(gradients, start=1):
        replicas = row.repeat(groups, 1)
        shares = gradient.repeat(touching, 1) * groups / touching
        optimizer.update(replicas[:touching], shares, step)
        row = replicas.double().mean(0, keepdim=True).float()
    return row[0]


@pytest.mark.parametrize(("groups", "touching"), [(2, 1), (4, 1), (4, 2), (4, 3), (4, 4), (8, 1)])
def test_groups_that_agree_move_an_old_row_as_one_group_would(groups, touching):
    """The moment is large: a group's step still has its own square in it, not the average."""
    gradients = torch.randn(50, 8, generator=torch.Generator().manual_seed(6))
    first, ratio = 1e6, groups / touching
    expected = train_in_groups(row_optimizer("rowwise_adagrad"), gradients, 1, 1, first)

    by_touch = row_optimizer(BY_TOUCH, scale=groups)
    row = train_in_groups(by_touch, gradients, groups, touching, first * ratio, touching - 1.0)
    moved = float(expected[:8].abs().max())
    torch.testing.assert_close(row[:8], expected[:8], rtol=0, atol=1e-4 * moved)
    assert float(row[8]) - first * ratio == pytest.approx(
        (float(expected[8]) - first) * ratio, rel=0.1
    ), "moments grow faster by all groups over those that touch the row"

    # The constant is right where one group touches the row; else its steps are too large.
    constant = row_optimizer(CONSTANT, scale=groups)
    row = train_in_groups(constant, gradients, groups, touching, first * ratio)
    too_large = touching**0.5 * moved
    torch.testing.assert_close(row[:8], expected[:8] * touching**0.5, rtol=0, atol=1e-4 * too_large)
