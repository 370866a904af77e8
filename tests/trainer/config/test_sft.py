"""Both trees of supervised fine-tuning lead to one, and are checked before anything starts."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.errors import DataError
from verl.trainer.config.sft import MOVED, as_engine_tree, parallel_sizes, parse_sft_config
from verl.trainer.sft.preflight import check_rows, idle_sharing
from verl.trainer.sft.trainer import SFTTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.observe.tracking import check_backends


@pytest.fixture(scope="module")
def trees(composed, small_run):
    files = [each for each in small_run if each.startswith(("data.train_files", "data.val_files"))]
    path = next(each for each in small_run if each.startswith("actor_rollout_ref.model.path")).split("=")[1]
    return {
        "sft_trainer": composed(*files, f"model.partial_pretrain={path}", name="sft_trainer", base=False),
        "sft_trainer_engine": composed(*files, f"model.path={path}", name="sft_trainer_engine", base=False),
    }


def violations(config, changes, world_size=1):
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        parse_sft_config(config, world_size)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def test_the_older_tree_is_moved(trees):
    config = trees["sft_trainer"].copy()
    config.optim.lr_scheduler = "constant"
    config.model.fsdp_config.cpu_offload = config.model.fsdp_config.offload_params = True
    moved = as_engine_tree(config)
    for old, new in MOVED.items():
        assert OmegaConf.select(moved, new) is not None or OmegaConf.select(config, old) is None
    optim, engine = omega_conf_to_dataclass(moved.optim), omega_conf_to_dataclass(moved.engine)
    assert (optim.lr, list(optim.betas), optim.lr_warmup_steps_ratio) == (1e-5, [0.9, 0.95], 0.1)
    assert (optim.lr_scheduler_type, engine.strategy) == ("constant", "fsdp2")
    assert (engine.offload_policy, engine.optimizer_offload) == (True, False)
    assert moved.data.max_length == 1024 and moved.data.prompt_key == "question"
    assert omega_conf_to_dataclass(moved.checkpoint).save_contents == ["model", "optimizer", "extra"]
    newer = trees["sft_trainer_engine"]
    assert as_engine_tree(newer) is newer


@pytest.mark.parametrize("name", ["sft_trainer", "sft_trainer_engine"])
def test_false_is_never(trees, name):
    config = trees[name].copy()
    config.trainer.save_freq = config.trainer.test_freq = False
    trainer = parse_sft_config(config).trainer
    assert not SFTTrainer._due(SimpleNamespace(steps_per_epoch=2, total_steps=4), trainer.test_freq, 4)
    assert trainer.save_freq is False


@pytest.mark.parametrize(
    ("name", "changes", "key", "message"),
    [
        ("sft_trainer", {"data.chat_template": "x"}, "data.chat_template", "must be null"),
        ("sft_trainer", {"model.partial_pretrain": "/no/model"}, "model.partial_pretrain", "no such folder"),
        ("sft_trainer", {"optim.lr_scheduler": "linear"}, "optim.lr_scheduler", "must be one of"),
        ("sft_trainer", {"data.micro_batch_size": 8}, "data.micro_batch_size", "micro_batch_size_per_gpu"),
        ("sft_trainer", {"data.micro_batch_size_per_gpu": 3}, "data.micro_batch_size_per_gpu", "128 rows"),
        ("sft_trainer_engine", {"data.train_batch_size": 3}, "data.train_batch_size", "multiple of the 2"),
        ("sft_trainer_engine", {"data.pad_mode": "left"}, "data.pad_mode", "no_padding, right"),
        ("sft_trainer_engine", {"trainer.save_freq": "often"}, "trainer.save_freq", "after_each_epoch"),
        ("sft_trainer_engine", {"optim.lr": -1.0}, "optim.lr", "in [0, 100]"),
        ("sft_trainer_engine", {"optim.total_training_steps": 9}, "optim.total_training_steps", "set by the trainer"),
        ("sft_trainer_engine", {"engine.forward_only": True}, "engine.forward_only", "the model is trained"),
        ("sft_trainer_engine", {"trainer.default_local_dir": "/dev/null"}, "trainer.default_local_dir", "is a file"),
        ("sft_trainer_engine", {"data.train_files": "/no/rows"}, "data.train_files", "no such file"),
        (
            "sft_trainer_engine",
            {"engine.ulysses_sequence_parallel_size": 2},
            "model.use_remove_padding",
            "must be true",
        ),
        (
            "sft_trainer_engine",
            {"engine.strategy": "megatron", "model.lora_rank": 4},
            "model.lora_rank",
            "must be 0 with engine=megatron",
        ),
        (
            "sft_trainer",
            {"use_prefix_sharing": True, "use_remove_padding": True, "trainer.device": "npu"},
            "use_prefix_sharing",
            "has no attention for trainer.device=npu",
        ),
        (
            "sft_trainer_engine",
            {"engine.strategy": "megatron", "model.use_liger": True},
            "model.use_liger",
            "must be false with engine=megatron",
        ),
        (
            "sft_trainer_engine",
            {"engine.strategy": "megatron", "optim.override_optimizer_config": {"clip_grad": 1.0}},
            "optim.override_optimizer_config.clip_grad",
            "write optim.clip_grad",
        ),
        (
            "sft_trainer_engine",
            {"engine.strategy": "megatron", "trainer.device": "npu"},
            "engine.strategy",
            "is not supported with trainer.device=npu: Megatron-Core runs on CUDA and CPU. Write engine=fsdp",
        ),
        (
            "sft_trainer_engine",
            {
                "trainer.device": "cpu",
                "model.use_fused_kernels": True,
                "model.fused_kernel_options.impl_backend": "triton",
            },
            "model.fused_kernel_options.impl_backend",
            "needs CUDA: write torch with trainer.device=cpu",
        ),
    ],
)
def test_refused(trees, name, changes, key, message):
    assert violations(trees[name], {}, world_size=2) == {}
    assert message in violations(trees[name], changes, world_size=2).get(key, "")


@pytest.mark.parametrize(("name", "node"), [("sft_trainer", ""), ("sft_trainer_engine", "model.")])
def test_padded_rows_share_nothing_and_a_notice_says_so(trees, name, node):
    config = trees[name].copy()
    OmegaConf.update(config, f"{node}use_remove_padding", False)
    assert idle_sharing(parse_sft_config(config), node) is None
    OmegaConf.update(config, f"{node}use_prefix_sharing", True)
    expected = f"{node}use_prefix_sharing=true ({node}use_remove_padding=false)"
    assert idle_sharing(parse_sft_config(config), node) == expected
    OmegaConf.update(config, f"{node}use_remove_padding", True)
    assert idle_sharing(parse_sft_config(config), node) is None


def test_workers_of_megatron_share_rows(composed):
    """Batches are counted over the data-parallel workers that tensor, pipeline and context parallelism leave."""
    config = composed("engine=megatron", "optim=megatron", name="sft_trainer_engine", base=False)
    assert parallel_sizes(config.engine) == dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1
    )


def test_models_that_megatron_core_does_not_have(composed, trees, tmp_path):
    files = {key: trees["sft_trainer_engine"].data[key] for key in ("train_files", "val_files")}
    config = composed("engine=megatron", "optim=megatron", name="sft_trainer_engine", base=False)
    config.data.update(files)
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": True}
    for architecture, name in (("LlamaForCausalLM", "llama"), ("Gemma2ForCausalLM", "gemma")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content | {"architectures": [architecture]}))
        (tmp_path / name / "tokenizer.json").write_text('{"model": {}}')
    path, biases = {"model.path": str(tmp_path / "llama")}, {"model.override_config": {"attention_bias": True}}
    assert violations(config, path | biases) == {} == violations(trees["sft_trainer_engine"], path)
    sharing = path | biases | {"model.use_prefix_sharing": True}
    assert violations(config, sharing) == {}
    found = violations(config, sharing | {"engine.context_parallel_size": 2}, world_size=2)
    assert "with megatron.context_parallel_size=2" in found["model.use_prefix_sharing"]
    found = violations(config, path)["model.path"]
    assert "mlp_bias=True without attention_bias is not supported" in found and "write engine=fsdp" in found
    found = violations(config, path | {"model.override_config": {"attention_bias": True, "hidden_act": "gelu"}})
    assert list(found) == ["model.override_config.hidden_act"]
    found = violations(config, {"model.path": str(tmp_path / "gemma")})
    assert "architecture Gemma2ForCausalLM is not supported" in found["model.path"]


@pytest.mark.parametrize(
    ("name", "key"), [("sft_trainer", "model.partial_pretrain"), ("sft_trainer_engine", "model.path")]
)
def test_a_vision_tower_that_several_workers_cannot_share(trees, tmp_path, name, key):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    changes = {key: str(tmp_path)}
    assert violations(trees[name], changes, 1) == {}
    assert "which runs on one worker only" in violations(trees[name], changes, 2)[key]


def test_the_default_tracker_is_installed(trees):
    for config in trees.values():
        assert check_backends(config.trainer.logger) == ["console"]


@pytest.mark.parametrize("path", ["/nowhere/global_step_3", "/nowhere/last", "/nowhere/global_step_²"])
def test_a_checkpoint_to_resume_from_that_is_none(trees, path):
    for mode in ("resume_path", "auto"):
        changes = {"trainer.resume_mode": mode, "trainer.resume_from_path": path}
        assert path in violations(trees["sft_trainer_engine"], changes)["trainer.resume_from_path"]


def test_rows_are_checked_before_torch_is_imported(tmp_path):
    file = tmp_path / "train.parquet"
    data = OmegaConf.create({"train_files": str(file), "val_files": None})
    for column, message in (
        ({"prompt": ["a"]}, r"column 'messages' \(data.messages_key\): is missing; the file has \['prompt'\]"),
        ({"messages": [[], [{"role": "user"}]]}, "row 0, column 'messages'.*is empty"),
        ({"messages": [["a"]]}, "row 0, column 'messages'.*got a list of string"),
    ):
        pq.write_table(pa.table(column), file)
        with pytest.raises(DataError, match=message):
            check_rows(data)
    doubled = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["messages", "messages"])
    pq.write_table(doubled, file)
    with pytest.raises(DataError, match="has 2 columns named 'messages'"):
        check_rows(data)
