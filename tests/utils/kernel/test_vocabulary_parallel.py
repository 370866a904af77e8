"""A fused head whose vocabulary lies on two ranks, against log_softmax over whole logits."""

import os

import torch
import torch.distributed as dist

from tests.ranks import note, spawn_ranks
from verl.utils.device.gloo import use_one_thread
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy, sum_gradients
from verl.utils.kernel.rows import HeadFormula


def compare(rank: int, store: str) -> None:
    """Score the same rows with half of the vocabulary, by torch in float64 and by Triton's interpreter in fp32."""
    use_one_thread()
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for backend, dtype, atol in (("torch", torch.float64, 1e-10), ("triton", torch.float32, 1e-5)):
        note(backend)
        compare_by(backend, dtype, atol, rank)


def compare_by(backend: str, dtype: torch.dtype, atol: float, rank: int) -> None:
    """Score 19 tokens, of which rank 0 has 10, and rank 1 the others and a row that pads the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(20, 16, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 19, (7,), generator=generator)
    log_p = torch.log_softmax(hidden @ weight[:19].T / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (2 * expected[0].sum() + expected[1].square().sum()).backward()

    mine = slice(10 * rank, 10 * rank + 10)
    h, w = hidden.detach().clone().requires_grad_(), weight.detach()[mine].clone().requires_grad_()
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
    (2 * found[0].sum() + found[1].square().sum()).backward()
    for each, other in zip((*found, h.grad, w.grad), (*expected, hidden.grad, weight.grad[mine]), strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=atol)


def test_two_ranks_with_half_of_the_vocabulary_each(tmp_path) -> None:
    spawn_ranks(compare, (f"file://{tmp_path}/store",))
