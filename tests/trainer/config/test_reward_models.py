"""What is refused of a reward model before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from verl.base_config import ConfigError
from verl.errors import WrongInput
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import validate_config
from verl.trainer.preflight import check_reward_model, check_run_machine

MODEL, PATH = "reward_model.model", "reward_model.model.path"
POOL = {"reward_model.enable_resource_pool": True, "reward_model.n_gpus_per_node": 2, "reward_model.nnodes": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    sizes = {"max_position_embeddings": 32, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(scope="module")
def base(composed, folder):
    return composed(
        "reward_model.enable=true",
        f"reward_model.model.path={folder}",
        "reward_model.micro_batch_size_per_gpu=2",
        "data.return_raw_chat=true",
        "reward_model.model.use_remove_padding=true",
    )


def changed(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def violations(base, changes):
    try:
        validate_config(changed(base, changes), use_reference_policy=False, use_critic=False)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def test_a_reward_model_that_fits(base):
    assert violations(base, {}) == {}
    assert violations(base, POOL) == {}
    assert violations(base, {f"{MODEL}.input_tokenizer": None, "data.return_raw_chat": False}) == {}
    assert violations(base, {"reward_model.use_dynamic_bsz": True, "reward_model.micro_batch_size_per_gpu": None}) == {}
    assert (
        violations(base, {PATH: "org/model", "reward_model.max_length": 4096, "reward_model.truncation": "left"}) == {}
    )
    assert violations(base, {"reward_model.ulysses_sequence_parallel_size": 2}) == {}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"reward_model.enable": "yes"}, "reward_model.enable", "true or false"),
        ({"reward_model.strategy": "megatron"}, "reward_model.strategy", "megatron_reward_model"),
        ({"reward_model.micro_batch_size_per_gpu": None}, "reward_model.micro_batch_size_per_gpu", "use_dynamic_bsz"),
        ({"reward_model.micro_batch_size": 4}, "reward_model.micro_batch_size", "is deprecated"),
        ({"reward_model.truncation": "up"}, "reward_model.truncation", "right, left, middle, error"),
        ({"reward_model.max_length": 33}, "reward_model.max_length", "33 tokens exceed the 32 positions"),
        ({"data.max_response_length": 20}, "reward_model.max_length", "max_response_length = 36 tokens exceed the 32"),
        ({"reward_model.model_type": "ranking"}, "reward_model.model_type", "discriminative, generative"),
        ({"data.return_raw_chat": False}, "data.return_raw_chat", f"{MODEL}.input_tokenizer=null"),
        (POOL | {"reward_model.nnodes": 0}, "reward_model.nnodes", "1 or more with reward_model.enable_resource_pool"),
        (POOL | {"reward_model.n_gpus_per_node": True}, "reward_model.n_gpus_per_node", "must be an integer"),
        ({"reward_model.ulysses_sequence_parallel_size": 3}, "reward_model.ulysses_sequence_parallel_size", "the 2 "),
        (
            POOL | {"reward_model.n_gpus_per_node": 8, "reward_model.ulysses_sequence_parallel_size": 8},
            "reward_model.ulysses_sequence_parallel_size",
            "4 attention heads do not divide over 8",
        ),
        (
            POOL | {"reward_model.n_gpus_per_node": 4, f"{MODEL}.fsdp_config.fsdp_size": 3},
            f"{MODEL}.fsdp_config.fsdp_size",
            "must divide the 4 workers of the reward model (reward_model.n_gpus_per_node x reward_model.nnodes)",
        ),
        (
            {f"{MODEL}.use_remove_padding": False, "reward_model.ulysses_sequence_parallel_size": 2},
            "reward_model.ulysses_sequence_parallel_size",
            "use_remove_padding=true",
        ),
        ({f"{MODEL}.fsdp_config.fsdp_size": 0}, f"{MODEL}.fsdp_config.fsdp_size", "must be -1"),
        ({f"{MODEL}.use_sham": True}, f"{MODEL}.use_sham", "the nearest in this node: use_shm"),
        ({PATH: "/no/model"}, PATH, "no such folder"),
        ({PATH: None}, PATH, "must be a string"),
    ],
)  # fmt: skip
def test_refused(base, changes, key, message):
    found = violations(base, changes)
    assert message in found.get(key, ""), found


GENERATIVE = POOL | {
    "reward_model.model_type": "generative",
    "reward_model.name": "vllm",
    "reward_model.response_length": 8,
    "reward_model.prompt_length": 24,
    "reward_model.micro_batch_size_per_gpu": None,
}


def test_a_generative_reward_model(base, folder, tmp_path):
    (folder / "functions.py").write_text("def preprocess(**row): ...\n\n\ndef postprocess(text): ...\n")
    node = GENERATIVE | {"reward_model.data_processor_config": {"path": str(folder / "functions.py")}}
    assert violations(base, node) == {}
    missing = violations(base, node | {"reward_model.data_processor_config.postprocess_fn_name": "score"})
    assert (
        "does not define it; it defines preprocess, postprocess"
        in missing["reward_model.data_processor_config.postprocess_fn_name"]
    )
    found = violations(base, node | {"reward_model.tensor_model_parallel_size": 3})
    assert "must divide the 2 workers" in found["reward_model.tensor_model_parallel_size"]
    found = violations(base, GENERATIVE)
    assert "Python file" in found["reward_model.data_processor_config.path"]
    found = violations(base, node | {"reward_model.prompt_length": 25})
    assert "plus answers of 8 tokens exceeds the 32 positions" in found["reward_model.prompt_length"]
    found = violations(base, node | {"reward_model.max_model_len": 40})
    assert "write at most 32" in found["reward_model.max_model_len"]
    served = node | {"reward_model.name": "sglang"}
    assert violations(base, served) == {}
    found = violations(base, served | {"reward_model.tensor_model_parallel_size": 3})
    assert "must divide the 2 workers" in found["reward_model.tensor_model_parallel_size"]
    found = violations(base, served | {"reward_model.engine_kwargs": {"sglang": {"tp_size": 2}}})
    assert "tensor_model_parallel_size" in found["reward_model.engine_kwargs.sglang.tp_size"]
    shutil.copytree(folder, tmp_path / "llava")
    unseen = {"model_type": "llava", "vision_config": {}}
    (tmp_path / "llava" / "config.json").write_text(json.dumps(unseen))
    found = violations(base, served | {PATH: str(tmp_path / "llava")})
    assert "takes no vision-language model of model_type 'llava'" in found.get("reward_model.name", ""), found
    shared = node | {"reward_model.enable_resource_pool": False}
    for name in ("vllm", "sglang"):
        assert "or write hf" in violations(base, shared | {"reward_model.name": name})["reward_model.name"]
    assert violations(base, shared | {"reward_model.name": "hf"}) == {}


def test_a_disabled_reward_model_is_not_checked_and_said_to_be_idle(base, caplog):
    changes = {"reward_model.enable": False, PATH: "/no/model", "reward_model.max_length": 0, **POOL}
    caplog.set_level("WARNING", logger="verl.trainer.config.validation")
    assert violations(base, changes) == {}
    assert "reward_model.model.path=/no/model (reward_model.enable=false)" in caplog.text
    assert "reward_model.enable_resource_pool=true (reward_model.enable=false)" in caplog.text


def test_what_a_reward_model_leaves_without_effect_is_said(base, folder, caplog):
    (folder / "reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): ...\n")
    node = {"custom_reward_function.path": str(folder / "reward.py"), "custom_reward_function.name": "score"}
    caplog.set_level("WARNING", logger="verl.trainer.config.validation")
    assert violations(base, node | {"reward_model.n_gpus_per_node": 2}) == {}
    assert "custom_reward_function validation only" in caplog.text
    assert "reward_model.n_gpus_per_node=2 (reward_model.enable_resource_pool=false)" in caplog.text


def test_workers_of_its_own_need_cores_too(base, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # a cluster of other tests may run in this process
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cores = {"ray_kwargs.ray_init.num_cpus": 3}
    check_run_machine(RunConfig.parse(changed(base, cores)))
    with pytest.raises(
        WrongInput, match=r"\+ reward_model\.n_gpus_per_node=2 x reward_model\.nnodes=1 asks for 4 workers"
    ):
        check_run_machine(RunConfig.parse(changed(base, cores | POOL)))


def test_heads_and_templates_are_looked_for_in_the_folder(base, folder):
    model = RunConfig.parse(base).reward_model
    body = {"model.norm.weight": torch.ones(4)}

    def answer(**head):
        save_file(body | head, folder / "model.safetensors", metadata={"format": "pt"})
        check_reward_model(model)

    with pytest.raises(WrongInput, match=r"holds no score\.weight"):
        answer()
    with pytest.raises(WrongInput, match="its score.weight has 2 labels"):
        answer(**{"score.weight": torch.ones(2, 4)})
    with pytest.raises(WrongInput, match=rf"{PATH}=.*: it holds 'v_head.0.weight', of a value head that is not read"):
        answer(**{"v_head.0.weight": torch.ones(1, 4)})
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(WrongInput, match=r"no chat template.*input_tokenizer=null"):
        answer(**{"score.weight": torch.ones(1, 4)})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    answer(**{"score.weight": torch.ones(1, 4)})
    model = RunConfig.parse(changed(base, {f"{MODEL}.input_tokenizer": None})).reward_model
    (folder / "chat_template.jinja").unlink()
    answer(**{"score.weight": torch.ones(1, 4)})
    answer(**{"v_head.summary.weight": torch.ones(1, 4)})
    save_file({"v_head.weight": torch.ones(1, 4)}, folder / "value_head.safetensors")
    answer()
    (folder / "value_head.safetensors").unlink()
