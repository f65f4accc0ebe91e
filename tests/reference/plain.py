"""Training as a plain PyTorch loop: dense `nn.Embedding` tables and `torch.optim`.

Nothing here imports the project, so a mistake there cannot hide here. A batch is one step: its
summed loss is divided by its summed weight, or by 1 where that is zero.

Row semantics: sgd and AdaGrad leave a row without gradient alone. Adam is lazy, as
`torch.optim.SparseAdam`: only rows that a batch looks up move, with the bias correction of the
number of steps that the whole table has seen. AdamW is as lazy: only such rows decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shapes: V rows of a table, D width, B samples, F dense features

B = TypeVar("B")


class RowwiseAdagrad(torch.optim.Optimizer):
    """AdaGrad with one second moment per row; the moment is divided by `scale`."""

    def __init__(self, weights: Iterable[Tensor], lr: float, eps: float, scale: float) -> None:
        super().__init__(list(weights), {"lr": lr, "eps": eps, "scale": scale})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight_VD in group["params"]:
                gradient_VD = weight_VD.grad
                state = self.state[weight_VD]
                moment_V = state.setdefault("moment", torch.zeros(len(weight_VD)))
                moment_V += gradient_VD.pow(2).mean(1)
                root_V = (moment_V / group["scale"]).sqrt() + group["eps"]
                weight_VD -= group["lr"] * gradient_VD / root_V[:, None]


class LazyAdamW(torch.optim.Optimizer):
    """The steps of `torch.optim.AdamW`, on rows of a sparse gradient alone."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        lr: float,
        eps: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        given = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas}
        super().__init__(list(weights), given)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight_VD in group["params"]:
                gradient = weight_VD.grad.coalesce()
                state = self.state[weight_VD]
                if not state:
                    state |= {"n": 0, "m": torch.zeros_like(weight_VD)}
                    state["s"] = torch.zeros_like(weight_VD)
                state["n"] += 1
                rows, g = gradient.indices()[0], gradient.values()
                m = state["m"][rows].lerp(g, 1 - beta1)
                s = state["s"][rows].mul(beta2).addcmul(g, g, value=1 - beta2)
                root = s.sqrt() / (1 - beta2 ** state["n"]) ** 0.5 + group["eps"]
                weight = weight_VD[rows] * (1 - group["lr"] * group["weight_decay"])
                weight_VD[rows] = weight - group["lr"] / (1 - beta1 ** state["n"]) * m / root
                state["m"][rows], state["s"][rows] = m, s


DECAY = 0.2
"""Weight decay of AdamW."""


def row_optimizer(
    name: str, weights: Iterable[Tensor], lr: float, eps: float, scale: float
) -> torch.optim.Optimizer:
    """The optimizer of table rows of that name; one group of ranks touches every row alone."""
    kinds: dict[str, Callable[[], Any]] = {
        "sgd": lambda: torch.optim.SGD(weights, lr=lr),
        "adagrad": lambda: torch.optim.Adagrad(weights, lr=lr, eps=eps),
        "rowwise_adagrad": lambda: RowwiseAdagrad(weights, lr, eps, 1.0),
        "adam": lambda: torch.optim.SparseAdam(list(weights), lr=lr, eps=eps),
        "adamw": lambda: LazyAdamW(weights, lr, eps, DECAY),
        "momentum_scaled_rowwise_adagrad": lambda: RowwiseAdagrad(weights, lr, eps, scale),
        "touch_scaled_rowwise_adagrad": lambda: RowwiseAdagrad(weights, lr, eps, scale),
    }
    return kinds[name]()


def embedding(weight_VD: Tensor, optimizer: str) -> nn.Embedding:
    """A table with these first rows, and the kind of gradient that the optimizer wants."""
    sparse = optimizer in ("adam", "adamw")
    return nn.Embedding.from_pretrained(weight_VD.clone(), freeze=False, sparse=sparse)


@dataclass
class PlainLoop(Generic[B]):
    """A model, and an optimizer each for its rows and for the rest."""

    model: Any
    """Has `tables`, apart from its dense parameters, and `loss(batch)`: a sum and its weight."""
    rows: torch.optim.Optimizer
    dense: torch.optim.Optimizer
    schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    clip: Callable[[], object] = lambda: None
    """Called between the backward pass and the steps."""

    def step(self, batch: B) -> float:
        """One batch; returns its mean loss."""
        self.rows.zero_grad()
        self.dense.zero_grad()
        total, weight = self.model.loss(batch)
        mean = total / (weight or 1.0)
        mean.backward()
        for group in self.dense.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # a sum over ranks has no holes
                    parameter.grad = torch.zeros_like(parameter)
        self.clip()
        self.rows.step()
        self.dense.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return float(mean.detach())


@dataclass
class PlainClicks:
    """Clicks of some samples: per feature a list of row numbers for each sample."""

    features_BF: Tensor
    label_B: Tensor
    weight_B: Tensor
    rows: Mapping[str, list[list[int]]]


class PlainDlrm(nn.Module):
    """Bottom MLP, sums of rows, dot products of all pairs below the diagonal, top MLP."""

    def __init__(
        self, tables: Mapping[str, nn.Embedding], bottom: nn.Module, top: nn.Module
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(dict(tables))
        self.bottom, self.top = bottom, top

    def loss(self, batch: PlainClicks) -> tuple[Tensor, float]:
        first_BD = self.bottom(batch.features_BF)
        vectors = [first_BD, *(self._summed(name, lists) for name, lists in batch.rows.items())]
        dots = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        logits_B = self.top(torch.cat([first_BD, torch.stack(dots, 1)], 1))[:, 0]
        losses_B = functional.softplus(logits_B) - logits_B * batch.label_B
        return (losses_B * batch.weight_B).sum(), float(batch.weight_B.sum())

    def _summed(self, name: str, lists: list[list[int]]) -> Tensor:
        every = self.tables[name](torch.tensor([row for one in lists for row in one]).long())
        parts = every.split([len(one) for one in lists])
        return torch.stack([part.sum(0) for part in parts])
