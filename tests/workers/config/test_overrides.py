"""``override_config`` reaches the part of the model that has the field, in every spelling, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.base_config import ConfigError
from verl.errors import WrongSetting
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.config.model import ConfigFields, read_config_json
from verl.workers.config.overrides import merged, overridden, override_problems
from verl.workers.rollout.engine_rope import engine_rope
from verl.workers.rollout.engine_settings import check_context

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SECTION = [2, 3, 3]
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 2}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write models as transformers 5 writes them, and as older versions did."""
    root = tmp_path_factory.mktemp("overrides")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTION}
    vision = transformers.Qwen2VLConfig(text_config={**SHAPE, "rope_parameters": rope}, vision_config=VISION)
    configs = {
        "text": transformers.Qwen2Config(**SHAPE),
        "vision": vision,
        "layers": transformers.Gemma3TextConfig(**SHAPE, head_dim=16),
    }
    for name, config in configs.items():
        config.architectures = ["Any"]
        config.save_pretrained(root / name)
    old_scaling = {"type": "mrope", "mrope_section": SECTION}
    old = {
        "old text": {"model_type": "qwen2", **SHAPE, "rope_theta": 1e6, "rope_scaling": None},
        "old vision": {
            **{"model_type": "qwen2_vl", **SHAPE, "rope_theta": 1e6},
            **{"rope_scaling": old_scaling, "vision_config": VISION},
        },
    }
    for name, content in old.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(content | {"architectures": ["Any"]}))
    return {name: str(root / name) for name in (*configs, *old)}


def model_of(folder: str, **changes: Any) -> HFModelConfig:
    return HFModelConfig(path=folder, load_tokenizer=False, override_config=changes)


FLAT = ("text", "old text", "vision", "old vision")


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
        {"model_config": {"rope_parameters": {"rope_type": "yarn", **YARN}}},
    ],
)
@pytest.mark.parametrize("theta", [None, 5.0])
def test_every_spelling_of_rope_reaches_the_language_model(
    folders: dict[str, str], name: str, changes: dict[str, Any], theta: float | None
) -> None:
    before = model_of(folders[name]).hf_config.get_text_config().rope_parameters
    model = model_of(folders[name], **changes, **({} if theta is None else {"rope_theta": theta}))
    rope = model.hf_config.get_text_config().rope_parameters
    assert rope["rope_type"] == "yarn" and rope["factor"] == 4.0 and "type" not in rope
    assert rope["rope_theta"] == (theta or before["rope_theta"])
    assert rope.get("mrope_section") == before.get("mrope_section")
    changed = model.config_changes()  # what engines get
    assert changed.get("text_config", changed)["rope_parameters"] == rope


@pytest.mark.parametrize("name", FLAT)
def test_fields_reach_the_part_of_the_model_that_has_them(folders: dict[str, str], name: str) -> None:
    model = model_of(folders[name], rope_theta=5.0, num_hidden_layers=1, dtype="bfloat16", attention_dropout=0.1)
    text = model.hf_config.get_text_config()
    assert text.rope_parameters["rope_theta"] == 5.0
    assert (text.num_hidden_layers, text.attention_dropout) == (1, 0.1)
    assert len(text.layer_types) == 1  # files hold it, and it follows from the number of layers
    fields = ConfigFields(overridden(read_config_json(folders[name]), model.override_config))
    launching = ConfigFields(fields.text_config) if name == "vision" else fields
    assert (launching.rope_parameters.get("rope_theta") or launching.rope_theta) == 5.0
    assert launching.num_hidden_layers == 1
    if "vision" in name:
        whole = model_of(folders[name], image_token_id=7, vision_config={"depth": 2}, text_config={"rope_theta": 9.0})
        assert (whole.hf_config.image_token_id, whole.hf_config.vision_config.depth) == (7, 2)
        assert whole.hf_config.vision_config.embed_dim == 16
        assert whole.hf_config.text_config.rope_parameters["rope_theta"] == 9.0


def test_fields_that_follow_from_a_change_follow(folders: dict[str, str]) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    for name in ("text", "old text"):
        model = model_of(folders[name], **sliding)
        assert model.hf_config.layer_types == ["sliding_attention"] * 2
        assert model.config_changes() == {**sliding, "layer_types": ["sliding_attention"] * 2}
    assert model_of(folders["text"]).config_changes() == {}
    assert model_of(folders["text"], attn_implementation="eager").hf_config._attn_implementation == "eager"


def test_the_parameters_of_another_type_go(folders: dict[str, str], tmp_path: Path) -> None:
    model_of(folders["vision"], rope_scaling={"rope_type": "yarn", **YARN}).hf_config.save_pretrained(tmp_path)
    for changes in ({"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": None}):
        rope = model_of(str(tmp_path), **changes).hf_config.text_config.rope_parameters
        assert rope == {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTION}
    rope = model_of(str(tmp_path), rope_scaling={"factor": 8.0}).hf_config.text_config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 8.0, 64)


def test_a_kind_of_layer_has_a_rope_of_its_own(folders: dict[str, str]) -> None:
    model = model_of(folders["layers"], rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0}})
    rope = model.hf_config.rope_parameters
    assert rope["full_attention"]["factor"] == 2.0 and rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("text", {"rope_thetta": 3}, "names rope_thetta, which the model does not read: rope_parameters"),
        ("vision", {"rope_thetta": 3}, "names rope_thetta, which the model does not read"),
        ("vision", {"text_config": {"hiden_size": 3}}, "names text_config.hiden_size, which the model does not read"),
        ("text", {"image_token_id": 5}, "names image_token_id, which the model does not read"),
        ("text", {"text_config": {"rope_theta": 5.0}}, "names text_config, and the model has no such node"),
        ("text", {"sliding_window": 8}, "names sliding_window, which needs use_sliding_window=true"),
        ("text", {"layer_types": ["linear"], "num_hidden_layers": 1}, "transformers refuses: |has no effect on"),
        ("text", {"rope_scaling": {"rope_type": "linear"}}, "transformers refuses: .*Missing required keys.*factor"),
        ("vision", {"hidden_size": "x"}, "transformers refuses: .*hidden_size"),
        ("text", {"model_type": "llama"}, "names model_type, which says what the files are"),
        ("layers", {"rope_theta": 5.0}, "names rope_theta, and the model has one RoPE for each kind of layer"),
        ("text", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "one RoPE for all layers"),
    ],
)
def test_a_change_without_effect_is_refused(
    folders: dict[str, str], name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.override_config=.*{message}"):
        model_of(folders[name], **changes).hf_config  # noqa: B018


def test_no_dropout_is_what_a_model_without_dropout_has(folders: dict[str, str]) -> None:
    off = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0}
    assert model_of(folders["text"], **off).hf_config.attention_dropout == 0.0
    with pytest.raises(ConfigError, match="names embd_pdrop, which the model does not read"):
        model_of(folders["text"], embd_pdrop=0.1).hf_config  # noqa: B018


EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "Phimoe", "Jamba", "JetMoe", "GptOss", "MiniMax")


@pytest.mark.parametrize("family", EXPERTS)
def test_what_messages_advise_for_experts_is_taken(tmp_path: Path, family: str) -> None:
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=2)
    config.architectures = ["Any"]
    config.save_pretrained(tmp_path)
    advised: dict[str, Any] = {"output_router_logits": False}
    advised |= {"router_jitter_noise": 0.0} if hasattr(config, "router_jitter_noise") else {}
    advised |= {"attention_dropout": 0.0} if hasattr(config, "attention_dropout") else {}
    model = model_of(str(tmp_path), **advised)
    assert {name: getattr(model.hf_config, name) for name in advised} == advised
    assert not list(override_problems(read_config_json(str(tmp_path)), advised))


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("rollout", ["vllm", "sglang"])
def test_a_context_that_is_too_long_is_stretched_as_its_message_advises(
    folders: dict[str, str], name: str, rollout: str
) -> None:
    config = RolloutConfig(name=rollout, prompt_length=100, response_length=100)
    with pytest.raises(WrongSetting, match="or set actor_rollout_ref.model.override_config.rope_scaling"):
        check_context(config, model_of(folders[name]).hf_config)
    for changes in (
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "dynamic", "factor": 4}},
    ):
        hf_config = model_of(folders[name], **changes).hf_config
        assert check_context(config, hf_config) == 200
        fields = engine_rope(rollout, hf_config, 200)
        assert fields.get("text_config", fields)["max_position_embeddings"] == 200  # their tables reach as far


def test_code_of_a_repository_may_read_anything() -> None:
    assert not list(override_problems({"model_type": "qwen2", "auto_map": {"AutoConfig": "a.B"}}, {"anything": 1}))
    assert not list(override_problems({"model_type": "of a fork"}, {"anything": 1}))


FIELDS = {
    "rope_theta": st.floats(1.0, 1e7),
    "num_hidden_layers": st.integers(1, 4),
    "attention_dropout": st.floats(0.0, 0.5),
    "rms_norm_eps": st.floats(1e-8, 1e-3),
    "max_position_embeddings": st.integers(16, 512),
    "initializer_range": st.floats(0.01, 1.0),
}


@settings(deadline=None, max_examples=25)
@given(name=st.sampled_from(FLAT), changes=st.fixed_dictionaries({}, optional=FIELDS))
def test_what_is_written_is_what_the_language_model_has(
    folders: dict[str, str], name: str, changes: dict[str, Any]
) -> None:
    model = model_of(folders[name], **changes)
    text = model.hf_config.get_text_config()
    held = {field: text.rope_parameters[field] if field == "rope_theta" else getattr(text, field) for field in changes}
    assert held == changes
    rest = model_of(folders[name]).hf_config.get_text_config()
    for field in FIELDS.keys() - changes.keys() - {"rope_theta"}:
        assert getattr(text, field) == getattr(rest, field)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{"rope_theta": 5.0}, {"rope_scaling": {"type": "yarn", **YARN}}, {"vocab_size": 90}]
)
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_engines_read_the_changes_of_a_vision_language_model(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    vllm = pytest.importorskip("vllm.config.model")
    sglang = pytest.importorskip("sglang.srt.utils.hf_transformers.config")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTION}
    config = getattr(transformers, f"{family}Config")(text_config={**SHAPE, "rope_parameters": rope})
    config.architectures = [f"{family}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    model = model_of(str(tmp_path), **changes)
    expected = model.hf_config.text_config
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    args = merged(model.config_changes(), engine_rope("vllm", model.hf_config, 64))
    object.__new__(vllm.ModelConfig)._apply_dict_overrides(found, args)  # all of them stand in a node
    args = merged(model.config_changes(), engine_rope("sglang", model.hf_config, 64))
    other = sglang.get_config(str(tmp_path), trust_remote_code=False, model_override_args=args)
    other.text_config.rope_parameters.pop("type", None)  # which SGLang adds for remote code
    for text in (found.text_config, other.text_config):
        assert (text.rope_parameters, text.vocab_size) == (expected.rope_parameters, expected.vocab_size)
