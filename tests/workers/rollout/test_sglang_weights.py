"""What is recorded while a loader writes into parameters, with a loader that stacks, pads and fuses as SGLang's do."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from verl.workers.rollout.checksum import tensor_checksum

pytest.importorskip("sglang")

from verl.workers.rollout.sglang_rollout.engine_process import merged
from verl.workers.rollout.sglang_rollout.weights import EngineWeights, aligned


class Stack(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.output_partition_sizes = [rows, rows]
        self.weight = nn.Parameter(torch.empty(2 * rows, 3))


class Model(nn.Module):
    """The second of two ranks: it holds the second half of each projection, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Stack(2)
        self.norm = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        self.embed = nn.Embedding(6, 3)
        self.fused = nn.Linear(3, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        waiting = None
        for name, tensor in weights:
            if name in ("gate_proj.weight", "up_proj.weight"):
                first = 0 if name.startswith("gate") else 2
                self.gate_up_proj.weight.data.narrow(0, first, 2).copy_(tensor[2:4])
            elif name == "norm.weight":
                self.norm.weight.data.copy_(tensor)
            elif name == "embed.weight":
                self.embed.weight[:5].data.copy_(tensor)
                self.embed.weight[5:].data.fill_(0)
            elif name == "a.a_proj.weight":
                waiting = tensor
            elif name == "a.b_proj.weight":
                assert waiting is not None
                self.fused.weight.data.copy_(torch.cat([waiting, tensor]))


def pairs() -> list[tuple[str, Tensor]]:
    shapes = {"gate_proj": (4, 3), "up_proj": (4, 3), "norm": (1, 3), "embed": (5, 3)}
    shapes |= {"a.a_proj": (2, 3), "a.b_proj": (2, 3)}
    return [(f"{name}.weight", torch.randn(shape)) for name, shape in shapes.items()]


def loaded(bucket: list[tuple[str, Tensor]]) -> tuple[Model, EngineWeights]:
    torch.manual_seed(0)
    model = Model()
    weights = EngineWeights(model)
    weights.begin()
    weights.load(bucket)
    return model, weights


def test_all_that_arrived_is_found() -> None:
    bucket = pairs()
    model, weights = loaded(bucket)
    weights.check_complete()
    assert weights.verify() == 1  # the first part of a fused tensor is known by the last
    assert weights.received == {name: int(tensor_checksum(tensor)) for name, tensor in bucket}
    assert model.norm.weight.equal(bucket[2][1].bfloat16())


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda model: model.gate_up_proj.weight[3], "up_proj.weight"),
        (lambda model: model.norm.weight[0], "norm.weight"),
        (lambda model: model.embed.weight[5], "embed.weight"),
        (lambda model: model.fused.weight[0], "a.b_proj.weight"),
    ],
)
def test_a_change_after_the_load_is_found(place, name: str) -> None:
    model, weights = loaded(pairs())
    with torch.no_grad():
        place(model)[1] += 1
    with pytest.raises(RuntimeError, match=f"1 of 6 tensors in the engine differ from what arrived: {name}"):
        weights.verify()


def test_a_parameter_that_is_packed_cannot_be_read() -> None:
    model, weights = loaded(pairs())
    model.norm.weight.data = model.norm.weight.data.clone()
    assert weights.verify() == 2


@pytest.mark.parametrize("name", ["gate_proj.weight", "up_proj.weight", "norm.weight", "embed.weight"])
def test_missing_tensors_have_their_names(name: str) -> None:
    """Also at the first update, of which the model's loader tells the names only as the tensors come."""
    for is_first in (True, False):
        _, weights = loaded([pair for pair in pairs() if is_first is False or pair[0] != name])
        if not is_first:
            weights.check_complete()
            weights.begin()
            weights.load([pair for pair in pairs() if pair[0] != name])
        with pytest.raises(RuntimeError, match=f"1 tensors of the rollout's model are missing: {name}"):
            weights.check_complete()


def test_unknown_and_repeated_tensors() -> None:
    with pytest.raises(RuntimeError, match="no tensor 'other.weight'"):
        loaded([*pairs(), ("other.weight", torch.ones(2))])
    with pytest.raises(RuntimeError, match=r"'norm.weight' came twice"):
        loaded([*pairs(), ("norm.weight", torch.ones(1, 3))])
    model = Model()
    part = EngineWeights(model, is_part=True)  # as with experts of other ranks
    part.load([("other.weight", torch.ones(2))])


def test_dtypes_are_known_of_tensors_that_are_copied_as_they_come() -> None:
    """Not of those from which something is computed, before or after the copy."""
    _, weights = loaded(pairs())
    known = {"gate_proj": "float32", "up_proj": "float32", "norm": "bfloat16", "embed": "float32", "a.b_proj": None}
    assert weights.dtypes == {f"{name}.weight": dtype for name, dtype in known.items()}

    class Shifted(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, tensor.exp() if "gate" in name else tensor) for name, tensor in weights)
            self.norm.weight.data.add_(1)

    shifted = EngineWeights(Shifted())
    shifted.load([pair for pair in pairs() if pair[0] in ("gate_proj.weight", "norm.weight")])
    assert shifted.dtypes == {"gate_proj.weight": None, "norm.weight": None}


def test_a_loader_may_change_the_tensor_that_it_takes() -> None:
    """As Gemma's, which adds 1 to the scales of norms: what it has written then is compared with what is held."""

    class Gemma(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name in ("norm.weight", "embed.weight"):
                    tensor += 1.0
                super().load_weights([(name, tensor)])

    bucket = [pair for pair in pairs() if "a." not in pair[0]]
    arrived = {name: tensor.clone() for name, tensor in bucket}
    model = Gemma()
    weights = EngineWeights(model)
    weights.load(bucket)
    assert weights.verify() == 0
    assert weights.received == {name: int(tensor_checksum(tensor)) for name, tensor in arrived.items()}
    assert model.norm.weight.equal((arrived["norm.weight"] + 1.0).bfloat16())
    assert {name for name, dtype in weights.dtypes.items() if dtype is None} == {"norm.weight", "embed.weight"}
    with torch.no_grad():
        model.embed.weight[0] -= 1
    with pytest.raises(RuntimeError, match="1 of 4 tensors in the engine differ from what arrived: embed.weight"):
        weights.verify()


def test_ranks_that_do_not_agree() -> None:
    assert merged([None, None]) is None
    one = {"checksums": {"a": 1, "b": 2}, "unverified": 0, "dtypes": {"a": "bfloat16", "b": "bfloat16"}}
    other = {"checksums": {"a": 1, "b": 3}, "unverified": 1, "dtypes": {"b": "float32", "c": "float16"}}
    dtypes = {"a": "bfloat16", "b": None, "c": "float16"}  # each rank has other layers
    assert merged([one, other]) == {"checksums": {"a": 1, "b": None}, "unverified": 1, "dtypes": dtypes}


def test_a_bucket_of_several_dtypes_is_joined_and_split_by_sglang() -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = [("odd", torch.arange(3, dtype=torch.bfloat16)), ("bias", torch.arange(2.0))]
    found = dict(FlattenedTensorBucket(named_tensors=aligned(bucket)).reconstruct_tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket)
