"""The Triton kernels of the fused head, compiled for the GPU, against whole logits in float64."""

import pytest
import torch

from tests.utils.kernel.rounding import assert_within, rounding_bounds
from tests.utils.kernel.test_linear_cross_entropy import FORMULAS, in_float64, inputs, plain
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy
from verl.utils.kernel.rows import HeadFormula


def run(given, formula, backend):
    """Return outputs and gradients of the fused head on the GPU, and the same by whole logits in float64 on the CPU."""
    trained = ("hidden", "weight", "bias")
    own = {n: t.cuda().requires_grad_(n in trained) for n, t in given.items()}
    fused = linear_log_probs_and_entropy(
        own["hidden"], own["weight"], own["labels"], formula, bias=own["bias"], entropy="grad", backend=backend,
        chunk_rows=64,
    )  # fmt: skip
    exact = {n: t.clone().requires_grad_(n in trained) for n, t in in_float64(given).items()}
    results = []
    for each, out in ((own, fused), (exact, plain(exact, formula, True))):
        (each["coefficients"][0] * out[0] + each["coefficients"][1] * out[1]).sum().backward()
        results.append([*(part.detach().cpu() for part in out), *(each[name].grad.cpu() for name in trained)])
    return results


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMULAS)
def test_fp32(name, backend):
    given, formula = inputs(70, 300, 40, torch.float32), FORMULAS[name]
    given["labels"].clamp_(max=148)
    found, exact = run(given, formula, backend)
    of = given["hidden"], given["weight"], given["bias"], *given["coefficients"], given["labels"]
    assert_within(found, exact, rounding_bounds(*of, formula))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_a_real_size(dtype, backend):
    """Sums are fp32: the outputs are as exact as the products; gradients are rounded to the dtype."""
    given = inputs(300, 20_011, 256, dtype)
    given["weight"] /= 8  # logits of a trained model
    given["bias"].zero_()
    found, exact = run(given, HeadFormula(temperature=0.9), backend)
    assert found[0].dtype == found[1].dtype == torch.float32 and found[2].dtype == dtype
    # Inputs are exact in both; a backend that stores logits in half precision rounds those of up to 10 by 0.03.
    for result, expected in zip(found[:2], exact[:2], strict=True):
        assert (result.double() - expected).abs().max() < (0.06 if dtype == torch.bfloat16 else 0.01)
    for result, expected in zip(found[2:], exact[2:], strict=True):
        assert (result.double() - expected).norm() < 0.02 * expected.norm()
