"""Masks, padding, schedules and groups."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils import groupwise
from verl.utils import torch_functional as VF

VALUES = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, 7.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_masked_statistics():
    kept = np.array([1.0, 2.0, 4.0, 7.0])
    assert VF.masked_sum(VALUES, MASK).item() == 14
    assert VF.masked_sum(VALUES, MASK, axis=-1).tolist() == [3.0, 11.0]
    assert VF.masked_mean(VALUES, MASK).item() == pytest.approx(3.5)
    assert VF.masked_var(VALUES, MASK).item() == pytest.approx(kept.var(ddof=1))
    assert VF.masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(kept.var())
    whitened = VF.masked_whiten(VALUES, MASK)[MASK.bool()]
    np.testing.assert_allclose(whitened, (kept - 3.5) / kept.std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(VF.masked_whiten(VALUES, MASK, shift_mean=False)[MASK.bool()], whitened + 3.5, rtol=1e-5)
    assert VF.masked_mean(VALUES, torch.zeros_like(MASK)).item() == 0
    for mask in (torch.zeros_like(MASK), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        with pytest.raises(ValueError, match="at least 2 elements"):
            VF.masked_var(VALUES, mask)


def test_response_mask():
    ids = torch.tensor([[5, 2, 9, 2], [5, 6, 7, 8], [2, 2, 1, 1], [7, 3, 2, 1]])
    assert VF.get_response_mask(ids, 2).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert VF.get_response_mask(ids, [2, 3], torch.bool)[3].tolist() == [True, True, False, False]


def test_padding_and_truncation():
    assert VF.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert VF.pad_2d_list_to_length([[1], [2, 3]], 9, 3).tolist() == [[1, 9, 9], [2, 3, 9]]
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.long)
    assert VF.pad_sequence_to_length(ids, 6, 0, left_pad=True).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert VF.pad_sequence_to_length(ids, 3, 0) is ids
    for how, want in {"left": [3, 4, 5], "right": [1, 2, 3], "middle": [1, 4, 5]}.items():
        got, got_mask = VF.postprocess_data(ids, mask, 3, 0, truncation=how)
        assert got.tolist() == [want] and got_mask.shape == (1, 3)
    padded, padded_mask = VF.postprocess_data(ids, mask, 7, 0, left_pad=False)
    assert padded.tolist() == [[1, 2, 3, 4, 5, 0, 0]] and padded_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    for kind in (ValueError, NotImplementedError):
        with pytest.raises(kind, match="5 tokens exceeds max_length=3"):
            VF.postprocess_data(ids, mask, 3, 0)
    with pytest.raises(ValueError, match="data.truncation"):
        VF.postprocess_data(ids, mask, 3, 0, truncation="both")
    tokenizer = lambda text, **_: {"input_ids": ids, "attention_mask": mask}  # noqa: E731
    assert VF.tokenize_and_postprocess_data("x", tokenizer, 5, 0)[0].tolist() == ids.tolist()
    assert VF.remove_pad_token(torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, 1], [1, 1, 0]])) == [
        [1, 2],
        [3, 4],
    ]


def test_post_process_logits_equals_sorting_by_hand():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    inf = math.inf
    assert VF.post_process_logits(None, logits, 0.5, 2, 1.0).tolist() == [[4.0, 2.0, -inf, -inf]]
    # softmax is about .64 .24 .09 .03: 0.7 needs the first two
    assert VF.post_process_logits(None, logits, 1.0, -1, 0.7).tolist() == [[2.0, 1.0, -inf, -inf]]
    assert VF.post_process_logits(None, logits.flip(-1), 1.0, 0, 0.1).tolist() == [[-inf, -inf, -inf, 2.0]]


def test_schedules():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def run(schedule, steps):
        rates = []
        for _ in range(steps):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return rates

    assert run(VF.get_constant_schedule_with_warmup(optimizer, 2), 4) == [0.0, 0.5, 1.0, 1.0]
    cosine = run(VF.get_cosine_schedule_with_warmup(optimizer, 2, 6, min_lr_ratio=0.2, init_lr_ratio=0.5), 7)
    np.testing.assert_allclose(
        cosine, [0.5, 0.75, *(0.6 + 0.4 * math.cos(math.pi * i / 4) for i in range(5))], atol=1e-12
    )
    wsd = run(VF.get_wsd_schedule_with_warmup(optimizer, 2, 12, min_lr_ratio=0.1, stable_ratio=0.6), 13)
    np.testing.assert_allclose(
        wsd, [0, 0.5, *[1.0] * 7, *(0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5))], atol=1e-12
    )
    with pytest.raises(ValueError, match=r"optim\.min_lr_ratio"):
        VF.get_cosine_schedule_with_warmup(optimizer, 0, 4, min_lr_ratio=2.0)


@pytest.mark.parametrize("labels", [["b", "a", "b"], [9, 4, 9], ["x", 3, "x"], np.array(["u", "v", "u"], object),
                                    torch.tensor([5, 2, 5])])  # fmt: skip
def test_index_of_any_labels(labels):
    index = groupwise.as_torch_index(labels)
    assert index.dtype == torch.long and sorted(set(index.tolist())) == [0, 1]
    assert index[0] == index[2] != index[1]


@pytest.mark.parametrize("make", [np.array, list, torch.tensor, lambda labels: np.array(labels, dtype=object)])
def test_index_of_floats_that_are_nearly_integers(make):
    near = groupwise.as_torch_index(make([1.0000001, 2.0, 1.0, 2.9999999, 3.0]))
    assert near[0] == near[2] and near[3] == near[4] and len(set(near.tolist())) == 3
    halves = groupwise.as_torch_index(make([0.5, 1.0, 0.5, 0.5000001]))
    assert halves[0] == halves[2] and len(set(halves.tolist())) == 3


def test_group_mean_std():
    scores, group = torch.tensor([1.0, 2.0, 4.0, 7.0, 7.0]), torch.tensor([0, 0, 1, 2, 2])
    mean, std, count = groupwise.group_mean_std(scores, group)
    torch.testing.assert_close(mean, torch.tensor([1.5, 0.0, 7.0]))
    torch.testing.assert_close(std, torch.tensor([0.5**0.5, 1.0, 1e-3]))
    assert count.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match="5 scores cannot be grouped by 4"):
        groupwise.group_mean_std(scores, group[:4])
    with pytest.raises(ValueError, match=r"shape \(B,\)"):
        groupwise.as_torch_index(np.zeros((2, 2)))


def test_gradient_norm_and_split():
    model = torch.nn.Linear(2, 1)
    assert VF.compute_grad_norm(model) == 0.0
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert VF.compute_grad_norm(model) == 5.0
    tensors = SimpleNamespace(batch_size=(5,))
    with pytest.raises(ValueError, match="5 rows do not divide into batches of 2"):
        VF.split_dict_tensor_into_batches(tensors, 2)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0.0, 0.5, -2.0])), min_size=1, max_size=8))
def test_scores_move_to_sampled_tokens(tokens):
    """Each goes to the last sampled token before it, else to the first one, so the sum of a row stays."""
    mask = torch.tensor([[sampled for sampled, _ in tokens]])
    scores = torch.tensor([[score for _, score in tokens]])
    moved = VF.moved_to_sampled(scores, mask)
    assert moved.sum() == scores.sum()
    places = mask[0].nonzero().flatten().tolist()
    expected = [0.0] * len(tokens)
    for at, (_, score) in enumerate(tokens):
        before = [place for place in places if place <= at]
        expected[before[-1] if before else places[0] if places else at] += score
    assert moved.tolist() == [expected]
    at_last = VF.at_last_sampled(torch.tensor([3.0]), mask)
    assert at_last.nonzero().tolist() == [[0, places[-1] if places else 0]] and at_last.sum() == 3.0
