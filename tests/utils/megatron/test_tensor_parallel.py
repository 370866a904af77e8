"""Log-probabilities and entropies of a sharded vocabulary against torch on the whole one.

One rank holds all columns, with padding behind them, or two ranks hold half of them each.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import spawn_ranks
from verl.utils.device.gloo import use_one_thread
from verl.utils.megatron import tensor_parallel
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_and_entropy
from verl.utils.numerics.log_probs import log_probs_and_entropy

ROWS, VOCAB = 7, 11


def logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype) * 3


LABELS = torch.arange(ROWS) % VOCAB


@pytest.mark.parametrize("chunk_elements", [1, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("inplace", [True, False])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, temperature: float, inplace: bool
) -> None:
    monkeypatch.setattr(tensor_parallel, "chunk_elements", lambda logits: chunk_elements)
    weights = torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64).view(2, ROWS)
    gradients, values = [], []
    for function in (_plain, _ours):
        leaf = logits().requires_grad_()
        log_probs, entropy = function(leaf, temperature, inplace)
        ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        gradients.append(leaf.grad)
        values.append(torch.stack([log_probs, entropy]).detach())
    torch.testing.assert_close(values[1], values[0], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=1e-10)


def _plain(leaf: torch.Tensor, temperature: float, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(leaf / temperature, -1)
    return log_p.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _ours(leaf: torch.Tensor, temperature: float, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return vocab_parallel_log_probs_and_entropy(
        leaf * 1.0, LABELS, temperature, entropy="grad", inplace_backward=inplace
    )


def _half(rank: int, store: str) -> None:
    """Hold six columns, of which the last one of rank 1 is padding."""
    use_one_thread()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mine = slice(6 * rank, 6 * rank + 6)
    whole = torch.nn.functional.pad(logits(), (0, 1), value=9.0)
    part = whole[:, mine].clone().requires_grad_()
    whole.requires_grad_()
    expected = _plain(whole[:, :VOCAB], 0.7, False)
    options = {"entropy": "grad", "vocab_size": VOCAB, "group": dist.group.WORLD, "inplace_backward": False}
    found = vocab_parallel_log_probs_and_entropy(part, LABELS, 0.7, **options)
    for log_probs, entropy in (expected, found):
        (2 * log_probs + entropy * torch.arange(ROWS)).sum().backward()
    pairs = [*zip(found, expected, strict=True), (part.grad, whole.grad[:, mine])]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_each_rank_holds_half_of_the_columns(tmp_path: Path) -> None:
    spawn_ranks(_half, (f"file://{tmp_path}/store",))


def test_half_precision_and_infinite_logits() -> None:
    half = logits(torch.bfloat16)
    half[:, -1] = -torch.inf
    found, entropy = vocab_parallel_log_probs_and_entropy(half, LABELS, 0.9, entropy="value")
    expected, expected_entropy = log_probs_and_entropy(half, LABELS, 0.9, entropy="value")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vocab_parallel_entropy(logits()), _plain(logits(), 1.0, True)[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"entropy": "yes"}, "'yes'"), ({"temperature": 0.0}, "positive"), ({"vocab_size": 12}, "12 tokens")],
)
def test_wrong_requests_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs_and_entropy(logits(), LABELS, **changes)


def test_responses_of_packed_logits() -> None:
    generator = torch.Generator().manual_seed(2)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
    ids = torch.randint(0, VOCAB, mask.shape, generator=generator)
    whole = torch.randn(*mask.shape, VOCAB, generator=generator, dtype=torch.float64)
    found = tensor_parallel.vocab_parallel_log_probs_from_logits_response_rmpad(ids, mask, whole[mask.bool()], 3)
    log_p = torch.log_softmax(whole, -1)
    for row, column in ((row, column) for row in range(3) for column in range(3)):
        at = 3 + column
        expected = log_p[row, at - 1, ids[row, at]] if mask[row, at] else 0.0
        assert found[row, column] == pytest.approx(float(expected), abs=1e-12)


def test_marks_of_parameters() -> None:
    from verl.utils.megatron import sequence_parallel

    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not tensor_parallel.is_tensor_parallel_param(parameter)
    assert not sequence_parallel.is_sequence_parallel_param(parameter)
    sequence_parallel.mark_parameter_as_sequence_parallel(parameter)
    assert sequence_parallel.is_sequence_parallel_param(parameter)
