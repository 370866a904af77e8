"""A fused head against log_softmax over whole logits, by torch and by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.utils.kernel.rounding import assert_within, rounding_bounds
from verl.utils import envs
from verl.utils.kernel.linear_cross_entropy import backend_of, linear_cross_entropy, linear_log_probs_and_entropy
from verl.utils.kernel.rows import HeadFormula, RowGrads, Rows

INTERPRETED = envs.flag("TRITON_INTERPRET")
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]


@pytest.mark.skipif(INTERPRETED, reason="runs the others of this file in the interpreter")
def test_all_of_this_in_the_interpreter_of_triton() -> None:
    """And of the row operations. It is chosen before Triton is imported, so it has a process of its own."""
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, "-k", "triton", __file__, Path(__file__).with_name("test_merged_rows.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "25 passed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]


def inputs(rows: int, columns: int, dim: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "hidden": torch.randn(rows, dim, generator=generator),
        "weight": torch.randn(columns, dim, generator=generator),
        "bias": torch.randn(columns, generator=generator),
        "coefficients": torch.randn(2, rows, generator=generator),
    }
    labels = torch.randint(0, columns, (rows,), generator=generator)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | {"labels": labels}


def plain(given: dict[str, Tensor], formula: HeadFormula, with_bias: bool) -> tuple[Tensor, Tensor]:
    x = given["hidden"] @ given["weight"].t()
    x = (x + given["bias"] if with_bias else x)[:, : formula.columns if formula.columns >= 0 else None] * formula.scale
    x = x if formula.softcap is None else formula.softcap * torch.tanh(x / formula.softcap)
    log_p = torch.log_softmax(x / formula.temperature, dim=-1)
    return log_p.gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def both_ways(given: dict[str, Tensor], formula: HeadFormula, with_bias: bool, **options: Any) -> list[list[Tensor]]:
    """Return outputs and gradients, fused and plain."""
    results = []
    for fused in (True, False):
        own = {n: t.clone().requires_grad_() if n in ("hidden", "weight", "bias") else t for n, t in given.items()}
        if fused:
            bias = own["bias"] if with_bias else None
            arguments = (own["hidden"], own["weight"], own["labels"], formula)
            out = linear_log_probs_and_entropy(*arguments, bias=bias, entropy="grad", **options)
        else:
            out = plain(own, formula, with_bias)
        (own["coefficients"][0] * out[0] + own["coefficients"][1] * out[1]).sum().backward()
        wanted = ("hidden", "weight", *(["bias"] if with_bias else []))
        results.append([*(x.detach() for x in out), *(own[name].grad for name in wanted)])
    return results


def in_float64(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor if name == "labels" else tensor.double() for name, tensor in given.items()}


def bounds_of(given: dict[str, Tensor], formula: HeadFormula, with_bias: bool) -> list[Tensor]:
    """Return the rounding bounds of what ``both_ways`` returns."""
    bias = given["bias"] if with_bias else None
    return rounding_bounds(given["hidden"], given["weight"], bias, *given["coefficients"], given["labels"], formula)


FORMULAS = {
    "plain": HeadFormula(),
    "temperature": HeadFormula(temperature=0.6),
    "scaled": HeadFormula(scale=0.125, temperature=1.3),
    "capped": HeadFormula(scale=1.5, softcap=5.0, temperature=0.7),
    "padded vocabulary": HeadFormula(columns=149, temperature=0.7),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
def test_torch_equals_whole_logits(name: str, chunk_rows: int) -> None:
    given = inputs(37, 151, 24, torch.float64)
    given["labels"].clamp_(max=148)
    fused, expected = both_ways(given, FORMULAS[name], with_bias=chunk_rows == 7, chunk_rows=chunk_rows)
    torch.testing.assert_close(fused, expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_fp32_equals_whole_logits(name: str, backend: str) -> None:
    """Compare with float64, for rows, columns and a width that are no multiples of a tile."""
    given, formula = inputs(70, 300, 40, torch.float32), FORMULAS[name]
    given["labels"].clamp_(max=148)
    for chunk_rows in (7, 512):
        with_bias = chunk_rows == 7
        fused, _ = both_ways(given, formula, with_bias, backend=backend, chunk_rows=chunk_rows)
        _, exact = both_ways(in_float64(given), formula, with_bias)
        assert_within(fused, exact, bounds_of(given, formula, with_bias))


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter of Triton")
@pytest.mark.parametrize("name", FORMULAS)
def test_triton_makes_the_same_logits_for_any_block_of_the_backward_pass(name: str) -> None:
    """A matrix product rounds by an element's place in its tile, so the tiles must lie as in the forward pass."""
    given, formula = inputs(70, 300, 40, torch.float32), FORMULAS[name]
    backend = backend_of("triton", torch.device("cpu"))
    rows = Rows(given["hidden"], given["weight"], given["bias"], given["labels"])
    sums = backend.row_sums(rows, formula.of(given["weight"]), True, 512)
    log_total = sums.total.log()
    grads = RowGrads(sums.largest + log_total, log_total - sums.weighted / sums.total, *given["coefficients"])
    whole = backend.logits_gradient(rows, formula, slice(0, 149), grads)
    parts = [backend.logits_gradient(rows, formula, slice(at, min(at + 30, 149)), grads) for at in range(0, 149, 30)]
    assert torch.equal(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_are_fp32_under_half_precision(backend: str) -> None:
    half = torch.bfloat16 if backend == "torch" else torch.float16  # the interpreter cannot multiply bf16
    given = inputs(90, 200, 32, half)
    fused, _ = both_ways(given, HeadFormula(), False, backend=backend, chunk_rows=8)
    exact = both_ways(in_float64(given), HeadFormula(), False)[1]
    assert fused[0].dtype == fused[1].dtype == torch.float32
    assert fused[2].dtype == fused[3].dtype == half
    rounding = 0.06  # of logits of up to 20 in bf16
    for found, expected in zip(fused[:2], exact[:2], strict=True):
        assert (found.double() - expected).abs().max() < 2 * rounding
    for found, expected in zip(fused[2:], exact[2:], strict=True):
        assert (found.double() - expected).norm() < rounding / 2 * expected.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_modes_and_frozen_weights(backend: str) -> None:
    given = inputs(5, 33, 16, torch.float32)
    hidden = given["hidden"].clone().requires_grad_()
    arguments = (hidden, given["weight"], given["labels"])
    log_probs, entropy = linear_log_probs_and_entropy(*arguments, entropy="value", backend=backend)
    assert entropy is not None and log_probs.requires_grad and not entropy.requires_grad
    log_probs.sum().backward()
    exact = in_float64(given) | {"hidden": given["hidden"].double().requires_grad_()}
    expected = plain(exact, HeadFormula(), False)
    expected[0].sum().backward()
    ones, zeros = torch.ones(5), torch.zeros(5)
    bounds = rounding_bounds(given["hidden"], given["weight"], None, ones, zeros, given["labels"], HeadFormula())
    assert hidden.grad is not None and exact["hidden"].grad is not None
    assert_within([log_probs, entropy, hidden.grad], [*expected, exact["hidden"].grad], bounds[:3])
    assert given["weight"].grad is None
    assert linear_log_probs_and_entropy(*arguments, backend=backend)[1] is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_have_a_gradient_of_zero(backend: str) -> None:
    """As of a rank that has no row and takes part in the collectives of the others."""
    weight = torch.randn(7, 16, requires_grad=True)
    hidden = torch.zeros(0, 16, requires_grad=True)
    out = linear_log_probs_and_entropy(
        hidden, weight, torch.zeros(0, dtype=torch.long), entropy="grad", backend=backend
    )
    assert [len(x) for x in out if x is not None] == [0, 0]
    (out[0].sum() * 0.0).backward()
    assert weight.grad is not None and not weight.grad.any() and hidden.grad is not None


class Largest(TorchDispatchMode):
    """Notes the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_never_whole(backend: str) -> None:
    rows, columns, chunk_rows = 128, 130, 16
    hidden, weight = torch.randn(rows, 16, requires_grad=True), torch.randn(columns, 16, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    with Largest() as largest:
        out = linear_log_probs_and_entropy(
            hidden, weight, labels, entropy="grad", backend=backend, chunk_rows=chunk_rows
        )
        assert out[1] is not None
        (out[0] + out[1]).sum().backward()
    as_bytes = 4 if backend == "triton" else 1  # the interpreter copies what it stores
    assert largest.elements <= as_bytes * chunk_rows * columns < rows * columns


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_cross_entropy(reduction: str) -> None:
    given = inputs(12, 33, 16, torch.float64)
    log_probs, entropy = plain(given, HeadFormula(temperature=0.7), False)
    hidden, labels = given["hidden"].view(3, 4, 16), given["labels"].view(3, 4)
    found = linear_cross_entropy(hidden, given["weight"], labels, 0.7, reduction)
    expected = {"none": log_probs.view(3, 4), "mean": log_probs.mean(), "sum": log_probs.sum()}[reduction]
    torch.testing.assert_close(found, (expected, entropy.view(3, 4)), atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_refused(backend: str) -> None:
    hidden, weight, labels = torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.long)
    wrong: tuple[Any, ...] = (
        ("backend of a fused head is one of torch, triton, got 'cuda'", (hidden, weight, labels), {"backend": "cuda"}),
        ("entropy must be one of", (hidden, weight, labels), {"entropy": "yes"}),
        ("chunk_rows must be at least 1", (hidden, weight, labels), {"chunk_rows": 0}),
        (r"must be \(N, H\), \(V, H\) and \(N,\)", (hidden, weight, labels[:3]), {}),
    )
    for message, arguments, options in wrong:
        with pytest.raises(ValueError, match=message):
            linear_log_probs_and_entropy(*arguments, **options)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        HeadFormula(temperature=0.0)
    with pytest.raises(ValueError, match="reduction must be"):
        linear_cross_entropy(hidden, weight, labels, reduction="max")
    message = "multiplies bf16, fp16 or fp32" if INTERPRETED else "needs a CUDA device, this one is cpu: write torch"
    with pytest.raises(ValueError, match=message):
        linear_log_probs_and_entropy(hidden.double(), weight.double(), labels, backend="triton")
