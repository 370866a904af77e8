"""A fused head whose vocabulary lies on two ranks, against log_softmax over whole logits."""

import os

import torch
import torch.distributed as dist

from tests.ranks import note, spawn_ranks
from tests.utils.kernel.rounding import assert_within, rounding_bounds
from verl.utils.device.gloo import use_one_thread
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy, sum_gradients
from verl.utils.kernel.rows import HeadFormula


def compare(rank: int, store: str) -> None:
    """Score the same rows with half of the vocabulary, by torch and by Triton's interpreter."""
    use_one_thread()
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        note(backend)
        compare_by(backend, dtype, rank)


def compare_by(backend: str, dtype: torch.dtype, rank: int) -> None:
    """Score 19 tokens, of which rank 0 has 10, and rank 1 the others and a row that pads the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator, dtype=dtype)
    weight = torch.randn(20, 16, generator=generator, dtype=dtype)
    labels = torch.randint(0, 19, (7,), generator=generator)
    of_log_probs, of_entropy = torch.full((7,), 2.0, dtype=dtype), torch.linspace(-1, 1, 7, dtype=dtype)

    exact_hidden = hidden.double().clone().requires_grad_()
    exact_weight = weight.double().clone().requires_grad_()
    log_p = torch.log_softmax(exact_hidden @ exact_weight[:19].T / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (of_log_probs * expected[0] + of_entropy * expected[1]).sum().backward()

    mine = slice(10 * rank, 10 * rank + 10)
    h, w = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    local = torch.where((labels >= mine.start) & (labels < mine.stop), labels - mine.start, -1)
    formula = HeadFormula(temperature=0.7, columns=10 - rank)
    found = linear_log_probs_and_entropy(
        sum_gradients(h, dist.group.WORLD),
        w,
        local,
        formula,
        entropy="grad",
        chunk_rows=3,
        group=dist.group.WORLD,
        backend=backend,
    )
    (of_log_probs * found[0] + of_entropy * found[1]).sum().backward()

    whole = HeadFormula(temperature=0.7, columns=19)
    unit = torch.finfo(dtype).eps  # twice the unit roundoff: where both sides are float64, both round
    bounds = rounding_bounds(hidden, weight, None, of_log_probs, of_entropy, labels, whole, unit)
    bounds[3] = bounds[3][mine]
    assert exact_weight.grad is not None
    assert_within([*found, h.grad, w.grad], [*expected, exact_hidden.grad, exact_weight.grad[mine]], bounds)


def test_two_ranks_with_half_of_the_vocabulary_each(tmp_path) -> None:
    spawn_ranks(compare, (f"file://{tmp_path}/store",), fresh=True)  # Triton reads the environment when imported
