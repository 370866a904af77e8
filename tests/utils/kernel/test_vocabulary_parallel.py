"""A fused head whose vocabulary lies on two ranks, against log_softmax over whole logits, in float64."""

import torch
import torch.distributed as dist

from tests.ranks import spawn_ranks
from verl.utils.gloo import use_one_thread
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy
from verl.utils.kernel.rows import HeadFormula


def compare(rank: int, store: str) -> None:
    """Score the same rows with half of the vocabulary."""
    use_one_thread()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(20, 16, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 20, (7,), generator=generator)
    log_p = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (2 * expected[0].sum() + expected[1].square().sum()).backward()

    mine = slice(10 * rank, 10 * rank + 10)
    h, w = hidden.detach().clone().requires_grad_(), weight.detach()[mine].clone().requires_grad_()
    local = torch.where((labels >= mine.start) & (labels < mine.stop), labels - mine.start, -1)
    formula = HeadFormula(temperature=0.7)
    found = linear_log_probs_and_entropy(h, w, local, formula, entropy="grad", chunk_rows=3, group=dist.group.WORLD)
    (2 * found[0].sum() + found[1].square().sum()).backward()
    dist.all_reduce(h.grad)
    for each, other in zip((*found, h.grad, w.grad), (*expected, hidden.grad, weight.grad[mine]), strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=1e-10)


def test_two_ranks_with_half_of_the_vocabulary_each(tmp_path) -> None:
    spawn_ranks(compare, (f"file://{tmp_path}/store",))
