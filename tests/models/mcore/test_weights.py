"""Rules between checkpoint and Megatron-Core tensors round-trip, in the layout that the model computes with."""

from typing import Any

import pytest
import torch
from torch import Tensor

from verl.errors import UnsupportedInput
from verl.models.mcore import families
from verl.models.mcore.weights import (
    Columns,
    QueryKeyValue,
    Rows,
    Rule,
    Shard,
    Stacked,
    TransposedRows,
    TransposedStacked,
    Vocabulary,
    Whole,
    reading_stacks,
    stacked,
)

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
    (QueryKeyValue(("q", "k", "v"), HEADS, GROUPS, DIM), query_key_value(WIDTH)),
    (QueryKeyValue(("q", "k", "v"), HEADS, GROUPS, DIM), query_key_value()),
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


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_single_experts_of_a_stack(size: int, published: bool) -> None:
    """They come from either layout of a checkpoint, and back into the published one."""
    width, hidden, experts = 4, WIDTH, 3
    whole = {
        "mlp.experts.gate_up_proj": tensor(experts, hidden, 2 * width),
        "mlp.experts.down_proj": tensor(experts, width, hidden),
    }
    stored = whole if published else {name: each.mT.contiguous() for name, each in whole.items()}

    def read_stored(name: str, shape: object, part: tuple[slice, ...]) -> Tensor:
        assert tuple(shape) == tuple(stored[name].shape)
        return stored[name][part]

    read = reading_stacks(read_stored, experts, {name: tuple(each.shape) for name, each in stored.items()})
    back = []
    for expert in (1, 0, 2):  # as expert-parallel ranks send them
        for rule, shape in (
            (TransposedStacked(f"mlp.experts.{expert}.gate_up_proj", 2, width), (2 * width // size, hidden)),
            (TransposedRows(f"mlp.experts.{expert}.down_proj", width), (hidden, width // size)),
        ):
            parts = [rule.load(read, Shard(rank, size), rule.names, torch.Size(shape)) for rank in range(size)]
            assert all(part.shape == shape for part in parts)
            back.append((rule.name, rule.export(parts)[0]))
    gate = whole["mlp.experts.gate_up_proj"][1, :, : width // size]
    first = TransposedStacked("mlp.experts.1.gate_up_proj", 2, width)
    held = first.load(read, Shard(0, size), first.names, torch.Size((2 * width // size, hidden)))
    assert torch.equal(held[: width // size], gate.T)  # the gate's part comes before that of the other projection
    found = dict(stacked(back, experts))
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


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

    config = Qwen2Config(architectures=["Qwen2ForQuestionAnswering"])
    with pytest.raises(ValueError, match="Qwen2ForQuestionAnswering.*LlamaForCausalLM"):
        families.find_family(config)
    for kind in ("Token", "Sequence"):
        config = Qwen2Config(architectures=[f"Qwen2For{kind}Classification"])
        assert families.find_family(config) is families.find_family(Qwen2Config(architectures=["Qwen2ForCausalLM"]))
    for change, message in (
        ({"mlp_bias": True}, "mlp_bias=True without attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ):
        config = LlamaConfig(architectures=["LlamaForCausalLM"], **change)
        with pytest.raises(NotImplementedError, match=message):
            families.find_family(config).config(config)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 4096}
    with pytest.raises(ValueError, match="type yarn"):
        families.rope_arguments(Qwen2Config(rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 6}, "num_experts_per_tok=6 with topk_group=2"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "type linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "truncate": False}}, "truncate"),
    ],
)
def test_deepseek_models_that_would_compute_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], **changes)
    with pytest.raises(UnsupportedInput, match=message):
        families.find_family(config).config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 6}, "num_experts_per_tok=6 with topk_group=2"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
    ],
)
def test_glm_models_that_would_compute_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], **changes)
    family = families.find_family(config)
    with pytest.raises(UnsupportedInput, match=message):
        family.config(config)
        family.rope(config)


def test_layers_have_experts_or_an_mlp() -> None:
    from transformers import DeepseekV3Config, Qwen3MoeConfig

    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=5, first_k_dense_replace=2)
    family = families.find_family(config)
    assert family.config(config)["moe_layer_freq"] == [0, 0, 1, 1, 1]
    kinds = [("mlp.router.weight" in rules, "mlp.linear_fc1.weight" in rules)
             for rules in (family.rules_of(config, layer) for layer in range(5))]  # fmt: skip
    assert kinds == [(False, True)] * 2 + [(True, False)] * 3
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert families.find_family(config).config(config)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
