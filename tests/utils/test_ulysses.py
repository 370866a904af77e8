"""Ulysses on two ranks: exchanges invert each other, and sliced attention equals whole attention."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import spawn_ranks
from verl.utils import ulysses


def _attend(rank: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, heads, width = 6, 4, 8
    shapes = [(tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width)]
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    expected = attention(*whole)
    expected_grads = torch.autograd.grad(expected.square().sum(), whole)
    mine = slice(rank * tokens // 2, (rank + 1) * tokens // 2)
    sliced = [t.detach()[mine].clone().requires_grad_() for t in whole]
    q, k, v = sliced
    if kv_heads < 2:
        k, v = (t.repeat_interleave(2 // kv_heads, dim=1) for t in (k, v))
    q, k, v = (ulysses.gather_seq_scatter_heads(t, seq_dim=0, head_dim=1) for t in (q, k, v))
    out = ulysses.gather_heads_scatter_seq(attention(q, k, v), head_dim=1, seq_dim=0)
    torch.testing.assert_close(out, expected[mine])
    out.square().sum().backward()
    for part, expected_grad in zip(sliced, expected_grads, strict=True):
        torch.testing.assert_close(part.grad, expected_grad[mine])


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    previous = ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    assert previous is None and ulysses.get_ulysses_sequence_parallel_world_size() == 2
    assert ulysses.get_ulysses_sequence_parallel_rank() == rank
    for kv_heads in (4, 2, 1):
        _attend(rank, kv_heads)
    # padding: five tokens are six on two ranks, the last one a sequence of its own
    ids, positions = torch.arange(5).unsqueeze(0) + 10, torch.arange(5).unsqueeze(0)
    mine, mine_positions, padding = ulysses.ulysses_pad_and_slice_inputs(ids, positions, sp_size=2)
    assert padding == 1 and mine.tolist() == [[[10, 11, 12], [13, 14, 0]][rank]]
    assert mine_positions.tolist() == [[[0, 1, 2], [3, 4, 0]][rank]]
    gathered = ulysses.gather_outputs_and_unpad(mine.float().requires_grad_(), 1, unpad_dim=1, padding_size=padding)
    assert gathered.tolist() == [[10.0, 11.0, 12.0, 13.0, 14.0]]
    # every rank has the gradient of the whole loss for its slice, once
    part = torch.full((1, 3), float(rank + 1), requires_grad=True)
    (ulysses.all_gather_tensor(part, dim=1) * torch.arange(6.0)).sum().backward()
    assert part.grad.tolist() == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][rank]]
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    spawn_ranks(_run, (str(tmp_path / "store"),))


def test_one_rank_changes_nothing() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert ulysses.gather_seq_scatter_heads(x, 0, 1) is x and ulysses.all_gather_tensor(x) is x
    assert ulysses.slice_input_tensor(x, dim=0) is x or torch.equal(ulysses.slice_input_tensor(x, dim=0), x)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (8, 2, 4), (6, 6, 3), (4, 1, 4)])
def test_heads_that_share_out(heads: int, kv_heads: int, size: int) -> None:
    ulysses.validate_ulysses_config(heads, size, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (12, 3, 2), (12, 4, 6)])
def test_heads_that_do_not_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"ulysses_sequence_parallel_size={size}"):
        ulysses.validate_ulysses_config(heads, size, kv_heads)
