"""Rules between checkpoint and Megatron-Core tensors: what is cut comes back, in the layout that the model computes."""

import pytest
import torch
from torch import Tensor

from verl.models.mcore import families
from verl.models.mcore.weights import Columns, QueryKeyValue, Rows, Rule, Shard, Stacked, Vocabulary, Whole

HEADS, GROUPS, DIM, WIDTH = 4, 2, 3, 5


def tensor(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * len(shape)


def query_key_value(*rest: int) -> dict[str, Tensor]:
    heads = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    return {name: tensor(count * DIM, *rest) + 200 * at for at, (name, count) in enumerate(heads.items())}


RULES: list[tuple[Rule, dict[str, Tensor]]] = [
    (Whole("norm"), {"norm": tensor(WIDTH)}),
    (Columns("fc", 8), {"fc": tensor(8, WIDTH)}),
    (Rows("out", 8), {"out": tensor(WIDTH, 8)}),
    (Vocabulary("embed", 7), {"embed": tensor(7, WIDTH)}),
    (Stacked(("gate", "up"), 6), {"gate": tensor(6, WIDTH), "up": tensor(6, WIDTH) + 50}),
    (QueryKeyValue("q", "k", "v", HEADS, GROUPS, DIM), query_key_value(WIDTH)),
    (QueryKeyValue("q", "k", "v", HEADS, GROUPS, DIM), query_key_value()),
]


def load(rule: Rule, stored: dict[str, Tensor], rank: int, size: int) -> Tensor:
    def read(name: str, shape: object, part: tuple[slice, ...]) -> Tensor:
        assert tuple(shape) == tuple(stored[name].shape)
        return stored[name][part] if part else stored[name]

    whole = next(iter(stored.values())).shape
    return rule.load(read, Shard(rank, size), rule.names, whole)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("rule", "stored"), RULES)
def test_what_is_cut_comes_back(rule: Rule, stored: dict[str, Tensor], size: int) -> None:
    parts = [load(rule, stored, rank, size) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    back = rule.export(parts)
    assert all(torch.equal(found, stored[name]) for name, found in zip(rule.names, back, strict=True))


def test_queries_stand_before_the_key_and_value_of_their_group() -> None:
    rule, stored = RULES[5]
    first = load(rule, stored, 0, 2)
    assert torch.equal(first, torch.cat([stored["q"][: 2 * DIM], stored["k"][:DIM], stored["v"][:DIM]]))


def test_padding_of_the_vocabulary_is_zero_and_stays() -> None:
    rule, stored = RULES[3]
    last = load(rule, stored, 1, 2)
    assert torch.equal(last[:3], stored["embed"][4:]) and (last[3] == 0).all()


def test_unknown_models_are_refused_by_name() -> None:
    from transformers import LlamaConfig, Qwen2Config

    config = Qwen2Config(architectures=["Qwen2ForSequenceClassification"])
    with pytest.raises(ValueError, match="Qwen2ForSequenceClassification.*LlamaForCausalLM"):
        families.find_family(config)
    config = Qwen2Config(architectures=["Qwen2ForTokenClassification"])
    assert families.architecture_of(config) == "Qwen2ForCausalLM"
    for change, message in (
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ):
        config = LlamaConfig(architectures=["LlamaForCausalLM"], **change)
        with pytest.raises(NotImplementedError, match=message):
            families.find_family(config).config(config)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 4096}
    with pytest.raises(ValueError, match="type yarn"):
        families.rope_arguments(Qwen2Config(rope_parameters=rope))
