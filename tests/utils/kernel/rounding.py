"""How far rounding may move what a fused head returns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.utils.kernel.rows import HeadFormula


def rounding_bounds(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    labels: Tensor,
    formula: HeadFormula,
    unit: float = 2.0**-24,
) -> list[Tensor]:
    """Bound the rounding errors of a head that computes with the given unit roundoff, to first order.

    The bounds hold for any order of summation, thus for every CPU kernel, and whether or not the backward pass rounds
    its logits as the forward pass did:

    - a product of n terms is off by at most ``n * unit`` times the product of the absolute values, so a logit z is off
      by dz, that product times the scale over the temperature;
    - a log-probability z - logsumexp(z) is off by E = 2 max(dz) plus the rounding of a sum over V columns;
    - p is off by the factor E, so the entropy H is off by E (1 + H), and the gradient
      g = c0 (1[label] - p) - c1 p (log p + H) by E p (|c0| + |c1| (|log p + H| + 2 + H));
    - a cap multiplies g by 1 - t^2 with t = tanh, which is off by 2 |t| dt;
    - the gradients of the inputs are products with g: its error times the absolute values, plus the product's own.

    Args:
        hidden: (N, H); weight (V, H); bias (V,); labels and the incoming gradients (N,).
    Returns: bounds of the log-probabilities (N,), the entropy (N,), and the gradients of hidden, weight and any bias.
    """
    rows, columns = len(hidden), len(weight)
    h, w = hidden.double(), weight.double()
    b = torch.zeros(columns).double() if bias is None else bias.double()
    c0, c1 = grad_log_probs.double()[:, None], grad_entropy.double()[:, None]
    tokens = formula.columns if formula.columns >= 0 else columns

    factor = formula.scale / formula.temperature
    z = formula.logits(h @ w.t() + b)
    dz = (hidden.shape[1] + 2) * unit * factor * (h.abs() @ w.abs().t() + b.abs()) + 8 * unit * z.abs()
    z[:, tokens:] = -torch.inf
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    log_p[:, tokens:] = 0.0
    entropy = -(p * log_p).sum(-1, keepdim=True)

    error = 2 * dz[:, :tokens].amax(-1, keepdim=True) + (columns + 8) * unit
    pull = c0 + c1 * (log_p + entropy)
    g = (torch.arange(columns) == labels[:, None]) * c0 - p * pull
    dg = error * p * (c0.abs() + c1.abs() * ((log_p + entropy).abs() + 2 + entropy)) + 8 * unit * g.abs()
    if formula.softcap is not None:
        to_tanh = formula.temperature / formula.softcap
        tanh = z * to_tanh
        tanh[:, tokens:] = 0.0
        dg = dg + g.abs() * 2 * tanh.abs() * dz * to_tanh
        g = g * (1 - tanh.square())
    g, dg = g.abs() * factor, dg * factor
    bounds = [
        (error + 2 * unit * z[:, :tokens].abs().amax(-1, keepdim=True)).squeeze(-1),
        (error * (1 + entropy)).squeeze(-1),
        (dg + (columns + 2) * unit * g) @ w.abs(),
        (dg + (rows + 2) * unit * g).t() @ h.abs(),
    ]
    return bounds if bias is None else [*bounds, (dg + (rows + 2) * unit * g).sum(0)]


def assert_within(found: Sequence[Tensor], expected: Sequence[Tensor], bounds: Sequence[Tensor]) -> None:
    """Compare each element with its float64 value; a bound of zero asks for equality."""
    for number, (each, exact, bound) in enumerate(zip(found, expected, bounds, strict=True)):
        off = (each.double() - exact.double()).abs()
        assert (off <= bound).all(), f"output {number}: off by {(off / bound).nan_to_num().max():.3g} times the bound"
