"""Generation with RoPE scaling: each row as alone, or as the actor computes it where an engine chooses once for a run.

The expected numbers are transformers' own, row by row. Tolerances: sums of fp32 in another order, 1e-4 for the engines,
whose tables of angles are made otherwise; the frequencies of another length give differences above 1e-2.
"""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.workers.rollout import tiny
from verl.base_config import WrongInput
from verl.models.transformers.rope import install_row_rope
from verl.workers.rollout.engine_rope import engine_rope, rope_length

PRETRAINED = 16
CONTEXT = tiny.PROMPT_LENGTH + tiny.RESPONSE_LENGTH  # 22: some rows stay below the pretraining's positions
SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.PAD,
}
LONG = {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": PRETRAINED}
YARN = {"factor": 2.0, "original_max_position_embeddings": PRETRAINED, "attention_factor": 1.3}
LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": LONG,
    "linear": {"factor": 4.0},
    "yarn": YARN,
    "llama3": {**LLAMA3, "original_max_position_embeddings": PRETRAINED},
    "proportional": {"partial_rotary_factor": 0.5},
}


def config_of(kind: str, family: str = "Llama") -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES.get(kind, {})}
    positions = 64 if kind in ("longrope", "proportional") else PRETRAINED
    own = {"original_max_position_embeddings": PRETRAINED} if family == "Phi3" else {}
    config_class = getattr(transformers, f"{family}Config")
    name = [f"{family}ForCausalLM"]
    return config_class(**SHAPE, **own, max_position_embeddings=positions, rope_parameters=rope, architectures=name)


def model_of(kind: str, family: str = "Llama") -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, family), dtype=torch.float32).eval()
    model.requires_grad_(False)
    tiny.disturb(model, 0.1, seed=1)
    return model


@pytest.mark.parametrize("kind, family", [("dynamic", "Llama"), ("longrope", "Phi3")])
def test_hf_generates_each_row_as_transformers_does_for_it_alone(tmp_path: Path, kind: str, family: str) -> None:
    model = model_of(kind, family)
    rollout = tiny.start_rollout("hf", model, tmp_path, ignore_eos=True)
    tiny.load_all(rollout, model)
    prompts = tiny.prompts_batch(6, seed=3, do_sample=False)
    asked = [list(prompt) for prompt in prompts.non_tensor_batch["raw_prompt_ids"]]
    assert min(map(len, asked)) + tiny.RESPONSE_LENGTH < PRETRAINED < max(map(len, asked)) + tiny.RESPONSE_LENGTH
    for _ in range(2):  # nothing is kept for the second pass
        found = rollout.generate_sequences(prompts).batch
        for row, prompt in enumerate(asked):
            alone = deepcopy(model).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tiny.RESPONSE_LENGTH,
                min_new_tokens=tiny.RESPONSE_LENGTH,
                do_sample=False,
                use_cache=kind == "dynamic",  # that of transformers 5.19 loses the prompt when longrope switches
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens = alone.sequences[0, len(prompt) :]
            assert found["responses"][row].tolist() == tokens.tolist()
            scores = torch.cat(alone.logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            torch.testing.assert_close(found["rollout_log_probs"][row], scores, rtol=0, atol=1e-5)


def test_only_engines_that_choose_once_bind_the_actor() -> None:
    hf_config = config_of("dynamic")
    lengths = {name: rope_length(tiny.rollout_config(name), hf_config) for name in ("vllm", "sglang", "hf")}
    assert lengths == {"vllm": CONTEXT, "sglang": CONTEXT, "hf": None}
    assert rope_length(tiny.rollout_config("vllm", max_model_len=40), hf_config) == 40
    assert rope_length(tiny.rollout_config("vllm"), config_of("yarn")) is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("length", [PRETRAINED, CONTEXT, 60])
def test_an_engine_gets_the_frequencies_of_the_actor(engine: str, length: int) -> None:
    """Both types become one without a choice, whose frequencies transformers computes too."""
    for kind in ("dynamic", "longrope"):
        model = model_of(kind)
        install_row_rope(model, length)
        x, positions = torch.zeros(1), torch.arange(length).unsqueeze(0)
        expected, _ = model.model.rotary_emb(x, positions)
        rope = engine_rope(engine, model.config, length)["rope_parameters"]
        scale = rope.pop("short_mscale", 1.0)
        assert rope.pop("long_mscale", 1.0) == scale
        config = config_of("default")
        if kind == "longrope":
            assert rope["short_factor"] == rope["long_factor"]
            config = config_of("longrope")
            assert rope["original_max_position_embeddings"] == length
            rope["attention_factor"] = scale
        else:
            assert rope["rope_type"] == "default"
        config.rope_parameters = rope
        angles, _ = type(model.model.rotary_emb)(config)(x, positions)
        torch.testing.assert_close(angles, expected, rtol=0, atol=1e-5)  # positions times rounded frequencies


def test_scalings_that_an_engine_computes_otherwise_are_refused() -> None:
    hf_config = config_of("proportional")
    hf_config.rope_parameters["factor"] = 2.0
    with pytest.raises(WrongInput, match="rope_scaling.factor=2.0: vllm ignores it for rope_type=proportional"):
        engine_rope("vllm", hf_config, CONTEXT)
    with pytest.raises(WrongInput, match="sglang computes it otherwise than transformers"):
        engine_rope("sglang", config_of("proportional"), CONTEXT)
    with pytest.raises(WrongInput, match="exceeds the 32 positions of yarn.*write factor=3"):
        engine_rope("sglang", config_of("yarn"), 40)
    text = config_of("linear")
    text.rope_parameters["mrope_section"] = [4, 6, 6]
    whole = SimpleNamespace(get_text_config=lambda: text, text_config=text)
    with pytest.raises(WrongInput, match="rope_type=linear: vllm has it for text models only"):
        engine_rope("vllm", whole, CONTEXT)  # type: ignore[arg-type]
    text.rope_parameters = {**text.rope_parameters, "rope_type": "dynamic"}
    rope = engine_rope("vllm", whole, CONTEXT)["text_config"]["rope_parameters"]  # type: ignore[arg-type]
    assert (rope["rope_type"], rope["mrope_section"]) == ("default", [4, 6, 6])
    experts = transformers.PhimoeConfig(
        **SHAPE,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.1, "long_mscale": 1.3, **LONG},
    )
    with pytest.raises(WrongInput, match="model_type='phimoe' with the short factors"):
        engine_rope("vllm", experts, CONTEXT)
    phi3 = engine_rope("sglang", config_of("longrope", "Phi3"), CONTEXT, spare_tokens=8)
    places = (phi3, phi3["rope_parameters"])  # no position of a run is beyond the table of the short factors
    assert [each["original_max_position_embeddings"] for each in places] == [CONTEXT + 8] * 2
    assert engine_rope("vllm", experts, PRETRAINED)["rope_parameters"]["long_mscale"] == 1.1


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind, family", [*((kind, "Llama") for kind in ROPES), ("longrope", "Phi3")])
def test_an_engine_samples_from_the_model_of_the_actor(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, kind: str, family: str
) -> None:
    pytest.importorskip(engine)
    if engine == "sglang" and kind == "proportional":
        pytest.skip("refused")
    if engine == "sglang":
        request.getfixturevalue("ray_cluster")
    model = model_of(kind, family)
    rollout = tiny.start_rollout(engine, model, tmp_path, ignore_eos=True, temperature=1.0)
    try:
        tiny.load_all(rollout, model)
        prompts = tiny.prompts_batch(8, seed=3)
        output = rollout.generate_sequences(prompts)
    finally:
        rollout.shutdown()
    asked = [list(prompt) for prompt in prompts.non_tensor_batch["raw_prompt_ids"]]
    for row, prompt in enumerate(asked):
        tokens = torch.tensor(prompt + output.batch["responses"][row].tolist())
        longest = torch.cat([tokens, tokens.new_full((CONTEXT - len(tokens),), 5)])  # what follows changes no score
        scores = deepcopy(model)(longest.unsqueeze(0)).logits[0, : len(tokens) - 1].log_softmax(-1)
        expected = scores.gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(output.batch["rollout_log_probs"][row], expected, rtol=0, atol=1e-4)
