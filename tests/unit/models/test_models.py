"""What every shipped model promises: exact splits, empty batches, independence, and learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.jagged import Jagged
from nestpipe.models import (
    Dlrm,
    DlrmConfig,
    HstuConfig,
    HstuRanker,
    HstuRetriever,
    RecModel,
    SampledSoftmaxConfig,
)
from nestpipe.models.protocol import in_precision

ITEMS = 40
HSTU = HstuConfig(
    blocks=2, heads=2, dim=8, attention_dim=4, value_dim=4, max_len=12, position_buckets=5
)
TIMED = HstuConfig(
    blocks=2, heads=2, dim=8, attention_dim=4, value_dim=4, max_len=12, time_buckets=6
)
FUXI = replace(TIMED, kind="fuxi")


def lists(lengths: list[int], generator: torch.Generator) -> Jagged:
    keys = torch.randint(1, ITEMS + 1, (sum(lengths),), generator=generator)
    return Jagged(keys, torch.tensor(lengths, dtype=torch.int64))


def clicks(size: int, generator: torch.Generator, longest: int = 3) -> Batch:
    """A click is likely where the first dense feature and the item's parity say so."""
    items = torch.randint(1, ITEMS + 1, (size,), generator=generator)
    features = torch.randn(size, 3, generator=generator)
    label = (features[:, 0] + 2 * (items % 2) - 1 > 0).float()
    lengths = torch.randint(0, longest + 1, (size,), generator=generator).tolist()
    sparse = {"item": Jagged.one_each(items), "tags": lists(lengths, generator)}
    return Batch(size, {"features": features, "label": label}, sparse)


def ranking(size: int, generator: torch.Generator) -> Batch:
    """A candidate is liked where its parity is that of the newest item."""
    histories = torch.randint(0, 7, (size,), generator=generator).tolist()
    numbers = torch.randint(0, 4, (size,), generator=generator).tolist()
    history, candidates = lists(histories, generator), lists(numbers, generator)
    newest = torch.tensor([row[-1] if row else 0 for row in history.to_lists()], dtype=torch.int64)
    newest_C = torch.repeat_interleave(newest, candidates.lengths)
    labels = (candidates.values % 2 == newest_C % 2).long()
    times = torch.arange(len(history.values)) * 3
    sparse = {
        "history": history,
        "candidates": candidates,
        "labels": Jagged(labels, candidates.lengths),
        "timestamps": Jagged(times, history.lengths),
    }
    return Batch(size, {"time": torch.full((size,), len(times) * 3 + 1)}, sparse)


def walks(size: int, generator: torch.Generator) -> Batch:
    """After item i comes item i + 1, or by chance i + 2."""
    rows = []
    for length in torch.randint(0, 9, (size,), generator=generator).tolist():
        steps = torch.randint(1, 3, (length,), generator=generator)
        start = torch.randint(0, ITEMS, (1,), generator=generator)
        rows.append(((start + steps.cumsum(0)) % ITEMS + 1).tolist())
    history = Jagged.from_lists(rows)
    times = Jagged(torch.arange(len(history.values)), history.lengths)
    sample_id = torch.randint(0, 1 << 40, (size,), generator=generator)
    return Batch(size, {"sample_id": sample_id}, {"history": history, "timestamps": times})


@dataclass(frozen=True)
class Case:
    """A model and the batches it reads."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], Batch]
    falls_to: float
    """Share of the first loss that a short training leaves at most."""


SOFTMAX = SampledSoftmaxConfig(num_items=ITEMS, negatives=6, temperature=0.2)
POOLED = replace(SOFTMAX, pool=20)
DLRM = DlrmConfig(features=("item", "tags"), dense_features=3, dim=4, bottom=(8,), top=(8,))
CASES = {
    "dlrm": Case(lambda: Dlrm(DLRM), clicks, 0.6),
    "ranker": Case(lambda: HstuRanker(HSTU), ranking, 0.6),
    "ranker with times": Case(lambda: HstuRanker(TIMED), ranking, 0.6),
    "retriever": Case(lambda: HstuRetriever(HSTU, SOFTMAX), walks, 0.75),
    "retriever with times": Case(lambda: HstuRetriever(TIMED, SOFTMAX), walks, 0.75),
    "retriever with a pool": Case(lambda: HstuRetriever(HSTU, POOLED), walks, 0.75),
    "fuxi ranker": Case(lambda: HstuRanker(FUXI), ranking, 0.6),
    "fuxi retriever": Case(lambda: HstuRetriever(FUXI, SOFTMAX), walks, 0.75),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return request.param


class Rows:
    """Tables as plain parameters, and what the trainer does with `sparse_keys` and `tables`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.model: RecModel = model  # type: ignore[assignment]
        self.tables = model.tables()  # type: ignore[operator]
        self.weights = {
            table.name: torch.randn(ITEMS + 1, table.dim, generator=generator, dtype=dtype)
            .mul_(0.1)
            .requires_grad_()
            for table in self.tables
        }

    def of(self, batch: Batch) -> dict[str, Tensor]:
        keys = self.model.sparse_keys(batch)
        rows = {}
        for table in self.tables:
            for feature in table.feature_names:
                picked = self.weights[table.name][keys[feature].values]
                if table.pooling == "sum":
                    parts = torch.split(picked, keys[feature].lengths.tolist())
                    picked = torch.stack([p.sum(0) for p in parts]) if parts else picked
                rows[feature] = picked
        return rows

    def loss(self, batch: Batch):
        return self.model.dense(self.of(batch), batch)


def gradients(model: nn.Module, rows: Rows, batches: list[Batch]) -> tuple[float, float, dict]:
    """Loss, weight and every gradient, summed over some batches."""
    leaves: Mapping[str, Tensor] = {**dict(model.named_parameters()), **rows.weights}
    for leaf in leaves.values():
        leaf.grad = None
    total = weight = 0.0
    for batch in batches:
        loss = rows.loss(batch)
        loss.total.backward()
        total, weight = total + float(loss.total.detach()), weight + loss.weight
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    assert all(grad is not None for grad in grads.values()), grads
    return total, weight, grads


@pytest.mark.parametrize("sizes", [[9], [4, 5], [1, 0, 7, 1], [1] * 9])
def test_micro_batches_add_up_to_the_batch(case: Case, sizes: list[int]):
    model = case.model()
    rows = Rows(model)
    batch = case.batches(9, torch.Generator().manual_seed(1))
    total, weight, whole = gradients(model, rows, [batch])
    split_total, split_weight, split = gradients(model, rows, batch.split(sizes))
    assert weight == split_weight > 0
    assert split_total == pytest.approx(total, rel=1e-6)
    for name, expected in whole.items():
        error = (split[name] - expected).abs().max()
        assert error <= 1e-6 * max(1.0, float(expected.abs().max())), name


def test_an_empty_batch_has_no_loss_and_zero_gradients(case: Case):
    model = case.model()
    rows = Rows(model)
    batch = case.batches(3, torch.Generator().manual_seed(1)).empty()
    total, weight, grads = gradients(model, rows, [batch])
    assert (total, weight) == (0.0, 0.0)
    assert all(not grad.any() for grad in grads.values())


def test_samples_without_any_key_do_no_harm(case: Case):
    model = case.model()
    rows = Rows(model)
    generator = torch.Generator().manual_seed(1)
    batch = case.batches(4, generator)
    nothing = Jagged.from_lists([[]] * 4)
    needed = {"item"} & batch.sparse.keys()
    sparse = {n: keys if n in needed else nothing for n, keys in batch.sparse.items()}
    total, _, grads = gradients(model, rows, [Batch(4, batch.dense, sparse)])
    assert total >= 0
    assert all(bool(grad.isfinite().all()) for grad in grads.values())


def test_the_order_of_samples_changes_nothing(case: Case):
    """In float64, so that only a real dependence is larger than the bound."""
    model = case.model().double()
    rows = Rows(model, torch.float64)
    batch = case.batches(9, torch.Generator().manual_seed(1))
    total, _, grads = gradients(model, rows, [batch])
    turned_total, _, turned = gradients(model, rows, [batch.select(torch.arange(8, -1, -1))])
    assert turned_total == pytest.approx(total, rel=1e-12)
    for name, expected in grads.items():
        torch.testing.assert_close(turned[name], expected, rtol=1e-9, atol=1e-12)


def test_it_learns(case: Case):
    model = case.model()
    rows = Rows(model)
    parameters = [*model.parameters(), *rows.weights.values()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(200):
        loss = rows.loss(case.batches(48, generator))
        mean = loss.total / loss.weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    assert sum(losses[-10:]) < case.falls_to * sum(losses[:10])


def test_the_same_batch_gives_the_same_bits(case: Case):
    model = case.model()
    rows = Rows(model)
    batch = case.batches(64, torch.Generator().manual_seed(1))
    _, _, first = gradients(model, rows, [batch])
    rows_of_first = {name: grad.clone() for name, grad in first.items() if name not in rows.weights}
    _, _, second = gradients(model, rows, [batch])
    assert all(torch.equal(second[name], grad) for name, grad in rows_of_first.items())


def test_it_is_a_rec_model(case: Case):
    assert isinstance(case.model(), RecModel)


def test_bfloat16_products_change_a_loss_a_little_and_leave_float32_gradients(case: Case):
    model = case.model()
    rows = Rows(model)
    batch = case.batches(9, torch.Generator().manual_seed(1))
    total, _, exact = gradients(model, rows, [batch])
    for leaf in [*model.parameters(), *rows.weights.values()]:
        leaf.grad = None
    with in_precision(torch.device("cpu"), "bf16"):
        loss = rows.loss(batch)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert float(loss.total.detach()) == pytest.approx(total, rel=0.02)
    assert float(loss.total.detach()) != total
    leaves = {**dict(model.named_parameters()), **rows.weights}
    size = max(float(grad.abs().max()) for grad in exact.values())
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert float((leaf.grad - exact[name]).abs().max()) <= 0.1 * size, name
