"""Heads of value models in checkpoints: which are read, which are refused by name, and what is no head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.value_heads import OTHER_NAMES, stored_head

BODY = {
    "model.embed_tokens.weight": (97, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.mlp.shared_expert_gate.weight": (1, 64),
    "model.layers.2.shared_head.head.weight": (97, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (97, 64),
    "visual.merger.mlp.0.weight": (64, 64),
    "vision_tower.vision_model.head.probe": (1, 1, 64),
    "roberta.embeddings.token_type_embeddings.weight": (1, 64),
}


def head_of(*heads, body=BODY):
    shapes = {**body, **dict(heads)}
    return stored_head(shapes, shapes.__getitem__)


def test_a_language_model_has_none():
    assert head_of() is None and stored_head(BODY) is None


@given(name=st.sampled_from(["score", *OTHER_NAMES]), has_bias=st.booleans(), width=st.integers(2, 9))
def test_a_linear_layer_with_one_output_is_read(name, has_bias, width):
    found = [(f"{name}.weight", (1, width)), *([(f"{name}.bias", (1,))] if has_bias else [])]
    assert head_of(*found) == name == stored_head(dict(found))


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        ({"v_head.0.weight": (64, 64), "v_head.2.weight": (1, 64)}, "v_head.0.weight"),
        ({"score.0.weight": (64, 64), "score.2.weight": (1, 64)}, "score.0.weight"),
        ({"value_head.weight": (2, 64)}, "value_head.weight"),
        ({"model.value_head.weight": (1, 64)}, "model.value_head.weight"),
        ({"classifier.dense.weight": (64, 64), "classifier.out_proj.weight": (1, 64)}, "classifier.dense.weight"),
        ({"v_head.weight": (1, 64), "value_head.weight": (1, 64)}, "value_head.weight"),
        ({"v_head.summary.weight": (1, 64), "v_head.dense.weight": (64, 64)}, "v_head.dense.weight"),
        ({"regression_layer.weight": (19, 64)}, "regression_layer.weight"),
        ({"rm_head.weight": (1, 64)}, "rm_head.weight"),
        ({"critic.out.weight": (1, 64)}, "critic.out.weight"),
        ({"my_output.weight": (1, 64)}, "my_output.weight"),  # by its shape
        ({"score.bias": (1,)}, "score.bias"),
    ],
)
def test_another_head_is_refused_by_name(heads, named):
    with pytest.raises(ValueError, match=f"^it holds '{named}', of a value head that is not read"):
        head_of(*heads.items())


def test_the_usual_name_comes_first():
    assert head_of(("score.weight", (1, 64)), ("v_head.summary.weight", (1, 64))) == "score"
