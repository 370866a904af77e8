"""The numbers that a fused head keeps of each row, and the two computations that need logits, in torch."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from verl.utils.numerics.log_probs import LOG_ZERO

LOWEST = -1e30
"""The largest logit if there is no column."""


@dataclass(frozen=True)
class HeadFormula:
    """The formula of the logits from ``x``, the product with the weight plus the bias.

    They are ``softcap * tanh(scale * x / softcap)``, or ``scale * x`` without a cap, divided by the temperature. Rows
    of the weight after ``columns`` are padding, not tokens; -1 stands for all rows.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    columns: int = -1

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def of(self, weight: Tensor) -> Self:
        """Return the formula with the number of columns; all rows of the weight by default."""
        return self if self.columns >= 0 else replace(self, columns=len(weight))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits divided by the temperature; overwrites ``x``."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return x if factor == 1.0 else x.mul_(factor)
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient in ``x`` from that in the logits; overwrites both arguments."""
        if self.softcap is not None:
            grad.mul_(logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


@dataclass(frozen=True)
class Rows:
    """Inputs of a head: hidden states (N, H), weight (V, H), bias (V,), and the column (N,) of each label, or -1."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


@dataclass(frozen=True)
class RowSums:
    """Sums over a part of the vocabulary, each (N,).

    ``largest`` is the largest logit of the row. With z = logit - largest, ``total`` is the sum of exp(z) and
    ``weighted`` that of z exp(z). ``label`` is the logit of the label, zero if it lies in another part.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor
    label: Tensor


@dataclass(frozen=True)
class RowGrads:
    """Inputs of the backward pass, each (N,).

    ``log_sum`` is the logarithm of the sum of all exponentials. ``entropy`` is None if it has no gradient.
    """

    log_sum: Tensor
    entropy: Tensor | None
    grad_log_probs: Tensor
    grad_entropy: Tensor


def rebase(sums: RowSums, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, weighted and label with z the logits less ``largest``; such triples add up over parts."""
    shift = sums.largest - largest
    factor = shift.exp()
    return sums.total * factor, (sums.weighted + shift * sums.total) * factor, sums.label


class Backend:
    """Computes from logits without keeping them: in torch, for every device. Subclasses use other kernels."""

    def row_sums(self, rows: Rows, formula: HeadFormula, with_entropy: bool, chunk_rows: int) -> RowSums:
        """Return the sums over all columns, from the logits of a chunk of rows at a time.

        ``weighted`` is zero unless ``with_entropy``.
        """
        dtype = torch.promote_types(rows.hidden.dtype, torch.float32)
        count = len(rows.hidden) if formula.columns else 0
        zeros = rows.hidden.new_zeros(4, len(rows.hidden), dtype=dtype)
        sums = RowSums(zeros[0].fill_(LOWEST), *zeros[1:])
        for at in range(0, count, chunk_rows):
            chunk = slice(at, at + chunk_rows)
            labels = rows.labels[chunk]
            z = formula.logits(_product(rows, chunk, slice(0, formula.columns)).to(dtype))
            sums.label[chunk] = z.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)
            sums.largest[chunk] = z.amax(-1)
            z.sub_(sums.largest[chunk].unsqueeze(-1))
            if not with_entropy:
                sums.total[chunk] = z.exp_().sum(-1)
                continue
            exponential = z.exp()
            sums.total[chunk] = exponential.sum(-1)
            sums.weighted[chunk] = exponential.mul_(z.clamp_(min=LOG_ZERO)).sum(-1)
        return sums

    def logits_gradient(self, rows: Rows, formula: HeadFormula, block: slice, grads: RowGrads) -> Tensor:
        """Return the gradient (N, block) in the product with the weight, in the dtype of the hidden states."""
        logits = formula.logits(_product(rows, slice(None), block).to(grads.log_sum.dtype))
        kept = logits if formula.softcap is None else logits.clone()  # only a cap needs them again
        log_p = logits.sub_(grads.log_sum.unsqueeze(-1))
        if grads.entropy is None:
            grad = log_p.exp_().mul_(-grads.grad_log_probs.unsqueeze(-1))
        else:
            grad = log_p.exp()
            pull = log_p.clamp_(min=LOG_ZERO).add_(grads.entropy.unsqueeze(-1)).mul_(grads.grad_entropy.unsqueeze(-1))
            grad.mul_(pull.add_(grads.grad_log_probs.unsqueeze(-1))).neg_()
        column = rows.labels - block.start
        here = (column >= 0) & (column < grad.shape[1])
        grad.scatter_add_(-1, torch.where(here, column, 0).unsqueeze(-1), (grads.grad_log_probs * here).unsqueeze(-1))
        return formula.gradient(grad, kept).to(rows.hidden.dtype)


def _product(rows: Rows, chunk: slice, columns: slice) -> Tensor:
    hidden = rows.hidden[chunk]
    weight = rows.weight[columns].t()
    return hidden @ weight if rows.bias is None else torch.addmm(rows.bias[columns], hidden, weight)
