"""Row optimizers: one application per row and batch, on rows that carry their own state.

Each works in place on (K, W) rows: D weights, then the state. What is here is the slow, plain form
with one rounding per operation, so that native code can give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels import native_rows
from nestpipe.kernels.native_rows import Gradients, Places

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
        """The plain form, on a GPU and where native code is not wanted."""
        self.apply(rows_KW, gradients_KD, step, self)

    def update_native(
        self,
        rows: Tensor | Places,
        dim: int,
        gradients: Sequence[Gradients],
        times: float,
        step: int,
    ) -> None:
        """The same on the host, with sums and the factor of the gradients in the same pass."""
        native_rows.update(
            self.name,
            rows,
            dim,
            gradients,
            times,
            lr=self.lr,
            eps=self.eps,
            betas=self.betas,
            scale=self.adam_scale(step),
        )

    def adam_scale(self, step: int) -> float:
        """Adam's learning rate with the bias correction of a step."""
        beta1, beta2 = self.betas
        return self.lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)


def _sgd(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    rows_KW[:, : gradients_KD.shape[1]].sub_(gradients_KD * of.lr)


def _adagrad(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    dim = gradients_KD.shape[1]
    weights_KD, sums_KD = rows_KW[:, :dim], rows_KW[:, dim:]
    sums_KD.add_(gradients_KD * gradients_KD)
    weights_KD.sub_(gradients_KD.div(root(sums_KD).add_(of.eps)).mul_(of.lr))


def _rowwise_adagrad(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    dim = gradients_KD.shape[1]
    weights_KD, sums_K1 = rows_KW[:, :dim], rows_KW[:, dim:]
    sums_K1.add_(sum_of_squares(gradients_KD).div_(dim))
    rates_K1 = root(sums_K1).add_(of.eps).reciprocal_().mul_(of.lr)
    weights_KD.sub_(gradients_KD * rates_K1)


def sum_of_squares(gradients_KD: Tensor) -> Tensor:
    """(K, 1) halves are added until one column is left: a fixed tree, whatever the machine."""
    squares = gradients_KD * gradients_KD
    while (columns := squares.shape[1]) > 1:
        half = (columns + 1) // 2
        squares[:, : columns - half].add_(squares[:, half:])
        squares = squares[:, :half]
    return squares


def root(numbers: Tensor) -> Tensor:
    """Square roots, rounded as IEEE 754 says.

    On the host torch takes those of Intel's library, of which one in six is a bit off. The root of
    a float32 is never so near to the middle of two that a second rounding could go wrong.
    """
    return numbers.sqrt() if numbers.is_cuda else numbers.double().sqrt().float()


def _adam(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    """Only touched rows move, with the bias correction of the run's step, as SparseAdam does."""
    dim = gradients_KD.shape[1]
    weights_KD = rows_KW[:, :dim]
    mean_KD, square_KD = rows_KW[:, dim : 2 * dim], rows_KW[:, 2 * dim :]
    beta1, beta2 = of.betas
    mean_KD.mul_(beta1).add_(gradients_KD * (1 - beta1))
    square_KD.mul_(beta2).add_((gradients_KD * gradients_KD).mul_(1 - beta2))
    weights_KD.sub_(mean_KD.div(root(square_KD).add_(of.eps)).mul_(of.adam_scale(step)))


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
