"""Row optimizers: one application per row and batch, on rows that carry their own state.

Each works in place on (K, W) rows: D weights, then the state. This is the plain form, with one
rounding per operation, so that native code gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.rows import native as native_rows
from nestpipe.kernels.rows.cuda import can_update, update_rows
from nestpipe.kernels.rows.native import Gradients, OptimizerStruct, RowPointers, optimizer_struct

# Shapes: K rows, N rows of a pool or the K rows, D weights of a row, W weights and state,
# U rows that are merged

ADAMW = "adamw"
TOUCH_SCALED = "touch_scaled_rowwise_adagrad"
NEWEST_SHARE = 0.25
"""What the last merge counts for in the average number of groups that touch a row."""


def constant(step: int) -> float:
    """A rate that never changes."""
    return 1.0


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
    """(rows_KW, gradients_KD, step from 1, the optimizer at that step): update rows in place."""
    betas: tuple[float, float] = (0.9, 0.999)
    scale: float = 1.0
    """What the scaled AdaGrads divide a row's second moment by, c: the number of groups, or, where
    groups are counted, the most that c can be. The others leave it alone."""
    weight_decay: float = 0.0
    """Decoupled, of rows that a batch touches: weights are first multiplied by 1 - lr x this."""
    schedule: Callable[[int], float] = constant
    """What the rate of a step, counted from 1, is over `lr`."""

    @property
    def counts_groups(self) -> bool:
        """Whether `count_groups` changes anything."""
        return self.name == TOUCH_SCALED

    @property
    def keep(self) -> float:
        """What weight decay leaves of a weight; 1 changes no bit."""
        return 1 - self.lr * self.weight_decay

    def at(self, step: int) -> RowOptimizer:
        """The optimizer with the rate of one step.

        `torch.optim.AdamW` adds eps to a root that is corrected already; Adam, as SparseAdam, to
        one that is not.
        """
        factor = self.schedule(step)
        eps = self.eps
        if self.name == ADAMW:
            eps *= (1 - self.betas[1] ** step) ** 0.5
        return replace(self, lr=self.lr * factor, eps=eps, schedule=constant)

    def state_dim(self, dim: int) -> int:
        return self.states_per_weight * dim + self.states_per_row

    def update(self, rows_KW: Tensor, gradients_KD: Tensor, step: int) -> None:
        """The plain form: the twin of both others."""
        of = self.at(step)
        if of.weight_decay:
            rows_KW[:, : gradients_KD.shape[1]].mul_(of.keep)
        self.apply(rows_KW, gradients_KD, step, of)

    def update_native(
        self,
        rows: Tensor | RowPointers,
        dim: int,
        gradients: Sequence[Gradients],
        times: float,
        step: int,
    ) -> None:
        """The same on the host, with sums and the factor of the gradients in the same pass."""
        native_rows.update(self.struct(step), rows, dim, gradients, times)

    def update_times(
        self,
        rows_NW: Tensor,
        gradients_KD: Tensor,
        times: float | Tensor,
        step: int,
        slots_K: Tensor | None = None,
    ) -> None:
        """The same on gradients times a number; on a GPU in one pass, where it has a kernel.

        With slots, int32 and none twice, gradient i belongs to row `slots_K[i]` of a pool of rows.
        The gradients are of no use afterwards.
        """
        if isinstance(times, Tensor) and can_update(rows_NW, gradients_KD, times, slots_K):
            update_rows(self.struct(step), rows_NW, gradients_KD, times, slots_K)
        elif slots_K is None:
            self.update(rows_NW, gradients_KD.mul_(times), step)
        else:
            rows_KW = rows_NW.index_select(0, slots_K)
            self.update(rows_KW, gradients_KD.mul_(times), step)
            rows_NW.index_copy_(0, slots_K.long(), rows_KW)

    def struct(self, step: int) -> OptimizerStruct:
        """The optimizer as kernels take it."""
        of = self.at(step)
        return optimizer_struct(
            self.name,
            lr=of.lr,
            eps=of.eps,
            betas=of.betas,
            adam_scale=of.adam_scale(step),
            scale=of.scale,
            keep=of.keep,
        )

    def count_groups(self, rows_UW: Tensor, dim: int, groups_U: Tensor) -> None:
        """Let merged rows know how many groups, at least one, touched each since the last merge.

        In place, and nothing at all for optimizers that do not count groups.
        """
        if not self.counts_groups:
            return
        beyond_one_U = (groups_U - 1).to(rows_UW.dtype)
        rows_UW[:, dim + 1].mul_(1 - NEWEST_SHARE).add_(beyond_one_U * NEWEST_SHARE)

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
    _move(rows_KW, gradients_KD, _add_to_moments(rows_KW, gradients_KD), of)


def _momentum_scaled(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    """Row-wise AdaGrad with the root of v / c; c = 1 changes no bit of it."""
    moments_K1 = _add_to_moments(rows_KW, gradients_KD)
    scales_K1 = torch.full_like(moments_K1, of.scale)
    _move(rows_KW, gradients_KD, moments_K1 / scales_K1, of)


def _touch_scaled(rows_KW: Tensor, gradients_KD: Tensor, step: int, of: RowOptimizer) -> None:
    """The same with a c for each row, by how many groups touch it on average: c = scale / groups.

    A row that one of M groups touches has a second moment M times too large; c = M corrects that.
    One that all touch with the same gradient has the right moment, and c = M would make its steps
    larger by the root of M. The number of groups stands in for what is not known, whether they
    agree: a row that all touch with gradients of mean zero would want M, and gets 1.
    """
    moments_K1 = _add_to_moments(rows_KW, gradients_KD)
    beyond_one_K1 = rows_KW[:, gradients_KD.shape[1] + 1 :]
    _move(rows_KW, gradients_KD, moments_K1 / touch_scales(beyond_one_K1, of.scale), of)


def _add_to_moments(rows_KW: Tensor, gradients_KD: Tensor) -> Tensor:
    """Add the mean square of its gradient to each row's second moment; returns the moments.

    By a tensor here and below: by a number torch divides with its reciprocal on a GPU, and rounds
    twice.
    """
    dim = gradients_KD.shape[1]
    moments_K1 = rows_KW[:, dim : dim + 1]
    squares_K1 = sum_of_squares(gradients_KD)
    return moments_K1.add_(squares_K1.div_(torch.full_like(squares_K1, dim)))


def _move(rows_KW: Tensor, gradients_KD: Tensor, moments_K1: Tensor, of: RowOptimizer) -> None:
    """Move the weights of each row by its gradient over the root of a moment."""
    rates_K1 = root(moments_K1).add_(of.eps).reciprocal_().mul_(of.lr)
    rows_KW[:, : gradients_KD.shape[1]].sub_(gradients_KD * rates_K1)


def touch_scales(beyond_one_K1: Tensor, scale: float) -> Tensor:
    """What each row's moment is divided by, given how many groups beyond one touch it on average.

    From `scale`, for a row that one group touches, down to 1.
    """
    groups_K1 = beyond_one_K1 + 1
    return (torch.full_like(groups_K1, scale) / groups_K1).clamp_(1, scale)


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
    """Only touched rows move, with the bias correction of the run's step, as SparseAdam does.

    AdamW differs by its eps, see `RowOptimizer.at`.
    """
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
    "momentum_scaled_rowwise_adagrad": (_momentum_scaled, 0, 1),
    TOUCH_SCALED: (_touch_scaled, 0, 2),
    ADAMW: (_adam, 2, 0),
}
OPTIMIZERS = tuple(_KINDS)


def row_optimizer(
    name: str,
    lr: float = 0.05,
    eps: float = 1e-8,
    scale: float = 1.0,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    schedule: Callable[[int], float] = constant,
) -> RowOptimizer:
    """The row optimizer of that name; those that are not scaled take no notice of `scale`."""
    if name not in _KINDS:
        raise ConfigError(f"unknown row optimizer {name!r}; use one of {', '.join(OPTIMIZERS)}")
    if not 1 <= scale < math.inf:
        raise ConfigError(
            f"the scale of the row optimizer is {scale}; give 1 or more, as the number of groups"
        )
    apply, per_weight, per_row = _KINDS[name]
    return RowOptimizer(
        name=name,
        lr=lr,
        eps=eps,
        states_per_weight=per_weight,
        states_per_row=per_row,
        state_init=0.0,
        apply=apply,
        betas=betas,
        scale=scale,
        weight_decay=weight_decay,
        schedule=schedule,
    )
