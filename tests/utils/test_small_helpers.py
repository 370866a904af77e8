"""Established helpers that stand alone: precisions, versions, lines with ranks, padding, activations."""

import logging

import pytest
import torch
from torch import nn

from verl.protocol import DataProto
from verl.utils import activation_offload
from verl.utils import logger as lines
from verl.utils.activation_offload import enable_activation_offloading, offloaded_activations
from verl.utils.attention_utils import index_first_axis, pad_input, rearrange, unpad_input
from verl.utils.engine_versions import is_version_ge
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.transformers_compat import is_transformers_version_in_range
from verl.workers.roles.padding import left_right_2_no_padding, no_padding_2_padding


@pytest.mark.parametrize(
    ("spellings", "dtype", "name"),
    [
        ((16, "16", "fp16", torch.float16), torch.float16, "fp16"),
        ((32, "32", "fp32", "float32"), torch.float32, "fp32"),
        (("bf16", "bfloat16", torch.bfloat16), torch.bfloat16, "bf16"),
    ],
)
def test_precisions(spellings, dtype, name):
    for spelling in spellings:
        assert PrecisionType.to_dtype(spelling) is dtype and PrecisionType.to_str(spelling) == name
        assert [getattr(PrecisionType, f"is_{kind}")(spelling) for kind in ("fp16", "fp32", "bf16")] == [
            kind == name for kind in ("fp16", "fp32", "bf16")
        ]
    with pytest.raises(RuntimeError, match=r"precision 'fp8' must be one of 16"):
        PrecisionType.to_dtype("fp8")


def test_versions(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.10.0")
    in_range = is_transformers_version_in_range
    assert in_range() and in_range("5.9", "5.10.0") and in_range(max_version="5.11") and in_range("5.10")
    assert not in_range("5.11") and not in_range(max_version="5.9")  # numbers, not letters
    assert is_version_ge("vllm", "5.9") and not is_version_ge("vllm", "5.11")


def test_lines_name_their_rank(capsys, caplog):
    lines.print_rank_0("first")
    lines.print_with_rank("second", rank=3)
    lines.print_with_rank("never", rank=3, log_only_rank_0=True)
    lines.print_with_rank_and_timer("third", rank=1)
    lines.DecoratorLoggerBase("actor").logging_function("fourth")
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["first", "[Rank 3] second"] and out[3:] == ["[Rank 0] actor fourth"]
    assert out[2].endswith("] [Rank 1] third")
    with caplog.at_level(logging.DEBUG):
        own = lines.DecoratorLoggerBase("critic", logging.getLogger("own"), rank=2, log_only_rank_0=False)
        own.logging_function("fifth")
        lines.log_with_rank("sixth", 1, logging.getLogger("own"), log_only_rank_0=True)
    own_records = [record for record in caplog.records if record.name == "own"]
    assert [(record.levelno, record.getMessage()) for record in own_records] == [
        (logging.DEBUG, "[Rank 2] critic fifth")
    ]


def test_padding_goes_and_comes_back():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    x = torch.arange(12.0).view(2, 3, 2)
    tokens, indices, offsets, longest, attended = unpad_input(x, mask)
    assert tokens.tolist() == [[2, 3], [4, 5], [6, 7]] and indices.tolist() == [1, 2, 3]
    assert offsets.tolist() == [0, 2, 3] and offsets.dtype == torch.int32
    assert longest == 2 and attended.tolist() == [2, 1]
    assert torch.equal(pad_input(tokens, indices, 2, 3), x * mask.unsqueeze(-1))
    assert torch.equal(index_first_axis(x, torch.tensor([1])), x[1:])
    more = unpad_input(x, mask, unused_mask=torch.tensor([[0, 0, 0], [0, 0, 1]]))
    assert more[1].tolist() == [1, 2, 3, 5] and more[4].tolist() == [2, 1]
    assert torch.equal(rearrange(x, "b (l k) d -> b l k d", k=1), x.unsqueeze(2))


def test_jagged_batches_and_back():
    """The value at a token is that of the token after it."""
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    ids = torch.tensor([[0, 5, 6, 7, 8], [1, 2, 3, 0, 0]])
    data = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 2:],
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        }
    )
    jagged = left_right_2_no_padding(data)
    assert [row.tolist() for row in jagged.batch["input_ids"].unbind()] == [[5, 6, 7, 8], [1, 2, 3]]
    assert [row.tolist() for row in jagged.batch["position_ids"].unbind()] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [row.tolist() for row in jagged.batch["loss_mask"].unbind()] == [[0, 1, 0, 1], [0, 0, 1]]
    assert (jagged.meta_info["max_seq_len"], jagged.meta_info["max_response_len"]) == (5, 3)
    following = torch.nested.nested_tensor_from_jagged(
        torch.tensor([6.0, 7, 8, 0, 2, 3, 0]), jagged.batch["input_ids"].offsets()
    )
    assert no_padding_2_padding(following, jagged).tolist() == [[6, 0, 8], [3, 0, 0]]
    data.batch["attention_mask"] = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="no token in row 0"):
        left_right_2_no_padding(data)


@pytest.fixture
def moved(monkeypatch):
    """Tensors that go to the host, which they really do here: a copy comes back."""
    tensors = []

    def to_host(tensor, pin_memory):
        tensors.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(activation_offload, "_to_host", to_host)
    return tensors


def test_offloaded_activations_give_the_same_gradient(moved):
    """What is small stays, and so do weights, however they are looked at: here (64, 64), activations (32, 64)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    model[2].requires_grad_(False)
    x = torch.randn(32, 64, requires_grad=True)

    def loss():
        frozen = model[2].weight.view(-1)[: 32 * 64].view(32, 64)
        return ((model(x) + x[:, :1]) * frozen * model[0].weight.T[:32]).square().sum()

    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(loss(), leaves)
    with offloaded_activations(model, pin_memory=False):
        value = loss()
    assert {tuple(tensor.shape) for tensor in moved} == {(32, 64)}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not weights & {tensor.untyped_storage().data_ptr() for tensor in moved}
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(value, leaves), expected, strict=True))


def test_a_forward_pass_may_offload_its_activations(moved):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(32, 64)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    enable_activation_offloading(model, "fsdp2")
    with torch.no_grad():
        model(x)
    assert not moved
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert len(moved) == 3  # of both products their input, of the tangent its output
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(ValueError, match="strategy='megatron' must be one of fsdp, fsdp2"):
        enable_activation_offloading(model, "megatron")
