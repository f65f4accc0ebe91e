"""Row optimizers: one application per row and batch, on rows that carry their own state.

Each works in place on (K, W) rows: D weights, then the state. The slow, plain form; a native or
GPU form must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.errors import ConfigError

# Shapes: K rows, D weights of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer:
    """What to do with the rows of a batch and their summed gradients."""

    name: str
    lr: float
    eps: float
    states_per_weight: int
    """float32 numbers of state per weight ..."""
    states_per_row: int
    """... and per row."""
    state_init: float
    apply: Callable[[Tensor, Tensor, int, RowOptimizer], None]
    """(rows_KW, gradients_KD, step from 1, self): update rows in place."""
    betas: tuple[float, float] = (0.9, 0.999)

    def state_dim(self, dim: int) -> int:
        return self.states_per_weight * dim + self.states_per_row

    def update(self, rows_KW: Tensor, gradients_KD: Tensor, step: int) -> None:
        self.apply(rows_KW, gradients_KD, step, self)


def _sgd(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    rows_KW[:, : gradients_KD.shape[1]].add_(gradients_KD, alpha=-of.lr)


def _adagrad(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    dim = gradients_KD.shape[1]
    weights_KD, sums_KD = rows_KW[:, :dim], rows_KW[:, dim:]
    sums_KD.addcmul_(gradients_KD, gradients_KD)
    weights_KD.addcdiv_(gradients_KD, sums_KD.sqrt().add_(of.eps), value=-of.lr)


def _rowwise_adagrad(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    dim = gradients_KD.shape[1]
    weights_KD, sums_K1 = rows_KW[:, :dim], rows_KW[:, dim:]
    # No temporary of the rows' size: it would cost more than the arithmetic.
    squares_K1 = torch.linalg.vector_norm(gradients_KD, dim=1, keepdim=True).square_()
    sums_K1.add_(squares_K1, alpha=1 / dim)
    weights_KD.addcmul_(gradients_KD, of.lr / (sums_K1.sqrt() + of.eps), value=-1)


def _adam(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    """Only touched rows move, with the bias correction of the run's step, as SparseAdam does."""
    dim = gradients_KD.shape[1]
    weights_KD = rows_KW[:, :dim]
    mean_KD, square_KD = rows_KW[:, dim : 2 * dim], rows_KW[:, 2 * dim :]
    beta1, beta2 = of.betas
    mean_KD.mul_(beta1).add_(gradients_KD, alpha=1 - beta1)
    square_KD.mul_(beta2).addcmul_(gradients_KD, gradients_KD, value=1 - beta2)
    scale = of.lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    weights_KD.addcdiv_(mean_KD, square_KD.sqrt().add_(of.eps), value=-scale)


_KINDS: dict[str, tuple[Callable[..., None], int, int]] = {
    "sgd": (_sgd, 0, 0),
    "adagrad": (_adagrad, 1, 0),
    "rowwise_adagrad": (_rowwise_adagrad, 0, 1),
    "adam": (_adam, 2, 0),
}
OPTIMIZERS = tuple(_KINDS)


def row_optimizer(name: str, lr: float = 0.05, eps: float = 1e-8) -> RowOptimizer:
    """The row optimizer of that name."""
    if name not in _KINDS:
        raise ConfigError(f"unknown row optimizer {name!r}; use one of {', '.join(OPTIMIZERS)}")
    apply, per_weight, per_row = _KINDS[name]
    return RowOptimizer(
        name=name,
        lr=lr,
        eps=eps,
        states_per_weight=per_weight,
        states_per_row=per_row,
        state_init=0.0,
        apply=apply,
    )
