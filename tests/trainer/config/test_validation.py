# ruff: noqa: E501 (one case per line reads as a table)
"""What is refused before anything starts: one message that lists every violation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY
from verl.algos.kl import check_kl_penalty
from verl.algos.names import ADV_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from verl.algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.base_config import BaseConfig, ConfigError, UnsupportedConfigError, as_yaml, omega_conf_to_dataclass
from verl.trainer.config.keys import OPTIONAL, select
from verl.trainer.config.rules.no_effect import FOLLOWS, IDLE, UNSUPPORTED
from verl.trainer.config.run_config import ABSENT, RunConfig, default_of
from verl.trainer.config.validation import validate_config
from verl.workers.config.engines import ROLLOUTS
from verl.workers.rewards.managers import REWARD_MANAGER_REGISTRY
from verl.workers.rewards.signature import SCORER_CALLS
from verl.workers.rollout.registry import ROLLOUT_CLASSES
from verl.workers.rollout.sglang_rollout.importing import STAND_IN

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def base(composed):
    return composed()


def changed(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def violations(base, changes, use_reference_policy=True, use_critic=True):
    try:
        validate_config(changed(base, changes), use_reference_policy, use_critic)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
SERVERS = f"{ROLLOUT}.agent.custom_async_server"
SERVED = {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.data_parallel_size": 2}


def test_the_small_run_is_right(base):
    assert violations(base, {}) == {}
    assert violations(base, {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.tensor_model_parallel_size": 2}) == {}
    assert violations(base, {f"{MODEL}.path": "Qwen/Qwen2.5-0.5B", "trainer.total_training_steps": 3}) == {}
    assert violations(base, {"data.val_files": None, "trainer.val_before_train": False}) == {}
    assert violations(base, {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.temperature": 2.5}) == {}
    assert violations(base, {"actor_rollout_ref.ref.model": {"path": "Qwen/Qwen2.5-0.5B"}}) == {}
    of_a_package = {f"{ROLLOUT}.mode": "async", f"{SERVERS}.path": "pkg://my.servers", f"{SERVERS}.name": "Replica"}
    assert violations(base, of_a_package) == {}
    assert violations(base, {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.n": 5, "data.train_batch_size": 8}) == {}


@pytest.mark.parametrize("path", ["{}", "file://{}", "~/reward.py"])
def test_a_python_file_is_looked_for_where_it_is_loaded_from(base, path, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def score(**_): ...")
    monkeypatch.setenv("HOME", str(tmp_path))
    node = {"custom_reward_function.path": path.format(tmp_path / "reward.py")}
    assert list(violations(base, node)) == ["custom_reward_function.name"]
    assert violations(base, node | {"custom_reward_function.name": "score"}) == {}


def test_the_folder_of_a_run_can_be_written_where_it_is_here(base, tmp_path, monkeypatch):
    key, dumps = "trainer.default_local_dir", "trainer.rollout_data_dir"
    (tmp_path / "file").write_text("")
    assert "is a file" in violations(base, {key: f"{tmp_path}/file"})[key]
    assert "is a file" in violations(base, {dumps: f"{tmp_path}/file/dumps"})[dumps]
    assert violations(base, {key: f"{tmp_path}/made", dumps: "/of/another/machine"}) == {}
    access = lambda path, mode: path != str(tmp_path)  # noqa: E731  # root may write wherever a test can be
    monkeypatch.setattr("verl.trainer.config.rules.files.os.access", access)
    assert f"{tmp_path} cannot be written" in violations(base, {key: f"{tmp_path}/made"})[key]


def test_a_batch_is_divided_by_every_engine_that_shares_it_out(base):
    """Four workers, of which two share each shard in the actor and in generation, but not in the reference policy."""
    shared = {"trainer.n_gpus_per_node": 4, f"{MODEL}.use_remove_padding": True, f"{ACTOR}.use_dynamic_bsz": True}
    shared |= {
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.n": 1,
    }
    shared |= {"data.train_batch_size": 6, f"{ACTOR}.ppo_mini_batch_size": 6}
    assert violations(base, shared, use_critic=False) == {}
    apart = shared | {"actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1}
    assert "a multiple of 4" in violations(base, apart, use_critic=False)["data.train_batch_size"]
    assert violations(base, apart, use_reference_policy=False, use_critic=False) == {}


@pytest.mark.parametrize(("written", "name"), [("clip-cov", "clip_cov"), ("kl-cov", "kl_cov")])
def test_losses_have_another_spelling(base, written, name):
    key = f"{ACTOR}.policy_loss.loss_mode"
    assert violations(base, {key: written}) == {}
    config = changed(base, {key: written})
    assert RunConfig.parse(config).actor_rollout_ref.actor.policy_loss.loss_mode == name
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss.loss_mode == name
    assert get_policy_loss_fn(written) is POLICY_LOSS_REGISTRY[name]


def test_values_as_published_scripts_write_them(base):
    changes = {"trainer.test_freq": False, "trainer.save_freq": False, "custom_reward_function.name": None}
    assert violations(base, changes) == {}
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    run = RunConfig.parse(config)
    assert run.trainer.test_freq <= 0 and run.trainer.save_freq <= 0
    assert run.custom_reward_function.name == "compute_score"


def test_experts_of_an_engine_on_the_devices_of_the_trainer_are_shared_as_the_message_says(base):
    replicas = {f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.expert_parallel_size": 2}
    told = violations(base, replicas)[f"{ROLLOUT}.data_parallel_size"]
    assert "a larger tensor_model_parallel_size and the same expert_parallel_size. Here: write 1" in told
    assert violations(base, {f"{ROLLOUT}.{name}_parallel_size": 2 for name in ("tensor_model", "expert")}) == {}


def test_servers_need_not_divide_the_workers_of_the_trainer(base):
    assert violations(base, SERVED | {f"{ROLLOUT}.data_parallel_size": 4, f"{ROLLOUT}.n_gpus_per_node": 8}) == {}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        # keys that are missing or of the wrong kind
        ({f"{ROLLOUT}.name": "???"}, f"{ROLLOUT}.name", "write vllm, sglang or hf"),
        ({"data": 3}, "data", "must be a mapping"),
        ({f"{ACTOR}.optim": 3}, f"{ACTOR}.optim", "must be a mapping"),
        ({f"{ACTOR}.optim.lr": "fast"}, f"{ACTOR}.optim.lr", "must be a number"),
        ({"actor_rollout_ref.ref.model": "a/model"}, "actor_rollout_ref.ref.model", "must be a mapping or null"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": "two"}, f"{ACTOR}.ulysses_sequence_parallel_size", "must be an integer"),
        ({"reward_model.reward_manager": ["naive"]}, "reward_model.reward_manager", "must be a string"),
        ({"ray_kwargs.timeline_json_file": True}, "ray_kwargs.timeline_json_file", "must be a string or null"),
        ({"global_profiler.tool": ["nsys"]}, f"{ACTOR}.profiler.tool", "must be null or one of nsys, npu"),
        ({f"{MODEL}.external_lib": 3}, f"{MODEL}.external_lib", "the name of a module"),
        ({f"{ACTOR}.optim.lr": float("nan")}, f"{ACTOR}.optim.lr", "must be a number"),
        ({f"{ACTOR}.fsdp_config.fsdp_size": "all"}, f"{ACTOR}.fsdp_config.fsdp_size", "must be an integer"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 0}, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "1 or more"),
        ({"critic.model.fsdp_config.ulysses_sequence_parallel_size": None}, "critic.model.fsdp_config.ulysses_sequence_parallel_size", "must be an integer"),
        ({f"{ACTOR}.fsdp_config.wrap_policy.min_num_params": "1e6"}, f"{ACTOR}.fsdp_config.wrap_policy.min_num_params", "an integer of 0 or more"),
        ({f"{ACTOR}.fsdp_config.wrap_policy.disable": 1}, f"{ACTOR}.fsdp_config.wrap_policy.disable", "true or false"),
        ({f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": 3}, f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", "a list of names"),
        ({f"{ACTOR}.optim.learning_rate": 1}, f"{ACTOR}.optim.learning_rate", "there is no such key"),
        ({f"{ACTOR}.optim._target_": "no.such.Class"}, f"{ACTOR}.optim._target_", "cannot be imported"),
        ({"data.seed": "${no.key}"}, "data.seed", "cannot be resolved"),
        # ranges and choices of plain nodes
        ({"data.train_batch_size": 0}, "data.train_batch_size", "an integer of 1 or more"),
        ({"data.truncation": "cut"}, "data.truncation", "error, left, right, middle"),
        ({"data.shuffle": "yes"}, "data.shuffle", "true or false"),
        ({"trainer.n_gpus_per_node": -1}, "trainer.n_gpus_per_node", "1 or more"),
        ({"trainer.resume_mode": "always"}, "trainer.resume_mode", "auto, disable, resume_path"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "global_step_<N>"),
        ({"trainer.test_freq": True}, "trainer.test_freq", "must be an integer or false"),
        ({"trainer.save_freq": "never"}, "trainer.save_freq", "must be an integer or false"),
        ({"trainer.logger": ["console", "wandbb"]}, "trainer.logger", "list of trackers"),
        ({"trainer.use_legacy_worker_impl": "maybe"}, "trainer.use_legacy_worker_impl", "auto, enable, disable"),
        ({"actor_rollout_ref.hybrid_engine": False}, "actor_rollout_ref.hybrid_engine", "needs servers"),
        (SERVED | {f"{ROLLOUT}.n_gpus_per_node": 3}, f"{ROLLOUT}.n_gpus_per_node", "tensor_model_parallel_size x data_parallel_size = 2"),
        ({f"{ROLLOUT}.data_parallel_size": 2}, f"{ROLLOUT}.data_parallel_size", "with hybrid_engine=true"),
        ({f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.on_failure": "drop", "trainer.worker_call_timeout_s": 600}, f"{ROLLOUT}.agent.step_timeout_s", "else a trajectory that hangs ends the run"),
        ({f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.on_failure": "replace", f"{ROLLOUT}.agent.step_timeout_s": None}, f"{ROLLOUT}.agent.step_timeout_s", "below trainer.worker_call_timeout_s=7200"),
        (SERVED | {f"{SERVERS}.path": "servers.py"}, f"{SERVERS}.name", "write path and name"),
        (SERVED | {f"{SERVERS}.path": "no.py", f"{SERVERS}.name": "Mine"}, f"{SERVERS}.path", "no such file"),
        ({f"{ROLLOUT}.mode": "async", f"{SERVERS}.path": __file__, f"{SERVERS}.name": "Mine"}, f"{SERVERS}.name", "does not define it"),
        ({"data.sampler.class_path": "pkg://x"}, "data.dataloader_num_workers", "must be 0"),
        ({"data.custom_cls.name": "Rows"}, "data.custom_cls.path", "the file that holds Rows"),
        # batch sizes
        ({"data.train_batch_size": 9, f"{ROLLOUT}.n": 1}, "data.train_batch_size", "write a multiple of 2"),
        ({f"{ACTOR}.ppo_mini_batch_size": 16}, f"{ACTOR}.ppo_mini_batch_size", "at most data.train_batch_size=8"),
        ({f"{ACTOR}.ppo_mini_batch_size": 6}, f"{ACTOR}.ppo_mini_batch_size", "must divide data.train_batch_size=8"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "divide the 8 sequences"),
        ({f"{ACTOR}.ppo_micro_batch_size": 4}, f"{ACTOR}.ppo_micro_batch_size", "set only ppo_micro_batch_size_per_gpu"),
        ({"critic.ppo_micro_batch_size_per_gpu": None}, "critic.ppo_micro_batch_size_per_gpu", "or use_dynamic_bsz=true"),
        (
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz=true",
        ),
        (
            {"actor_rollout_ref.ref.log_prob_micro_batch_size": 4},
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "is deprecated and excludes",
        ),
        # layout
        ({f"{ROLLOUT}.tensor_model_parallel_size": 4}, f"{ROLLOUT}.tensor_model_parallel_size", r"write one of [1, 2]"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, f"{ACTOR}.ulysses_sequence_parallel_size", "use_remove_padding"),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 3, f"{MODEL}.use_remove_padding": True},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "4 attention heads do not divide over 3 Ulysses ranks",
        ),
        (
            {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 8},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "4 attention heads do not divide over 8",
        ),
        (
            {"trainer.n_gpus_per_node": 4, f"{ACTOR}.fsdp_config.fsdp_size": 3},
            f"{ACTOR}.fsdp_config.fsdp_size",
            "must divide the 4 workers",
        ),
        (
            {"actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": 2},
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "needs packed sequences: set actor_rollout_ref.model.use_remove_padding=true",
        ),
        (
            {"critic.model.fsdp_config.ulysses_sequence_parallel_size": 2},
            "critic.ulysses_sequence_parallel_size",
            "set critic.model.use_remove_padding=true",
        ),
        (
            {
                f"{MODEL}.use_prefix_sharing": True,
                f"{MODEL}.use_remove_padding": True,
                f"{MODEL}.override_config": {"attention_dropout": 0.1},
            },
            f"{MODEL}.use_prefix_sharing",
            "needs attention_dropout=0.0, it is 0.1",
        ),
        (
            {
                "critic.model.use_prefix_sharing": True,
                "critic.model.use_remove_padding": True,
                "critic.model.override_config": {"attn_implementation": "sdpa"},
            },
            "critic.model.use_prefix_sharing",
            "leave attn_implementation=sdpa out of override_config",
        ),
        (
            {f"{MODEL}.override_config": {"attn_implementation": "sdpa", "attn_logit_softcapping": 50.0}},
            f"{MODEL}.override_config.attn_implementation",
            "drops attn_logit_softcapping=50.0: leave it out, or write eager",
        ),
        ({"data.gen_batch_size": 5, f"{ROLLOUT}.n": 1}, "data.gen_batch_size", "write a multiple of 2"),
        # what another key decides
        ({f"{ACTOR}.use_remove_padding": True}, f"{ACTOR}.use_remove_padding", "follows actor_rollout_ref.model"),
        (
            {f"{ACTOR}.use_prefix_grouper": True, f"{MODEL}.use_prefix_sharing": False},
            f"{ACTOR}.use_prefix_grouper",
            "follows actor_rollout_ref.model.use_prefix_sharing",
        ),
        ({f"{ACTOR}.optim.total_training_steps": 9}, f"{ACTOR}.optim.total_training_steps", "is set by the trainer"),
        (
            {"actor_rollout_ref.ref.model": {"path": "Qwen/Qwen2.5-0.5B"}, f"{MODEL}.lora_rank": 8},
            "actor_rollout_ref.ref.model.path",
            "the actor without its adapters",
        ),
        ({"actor_rollout_ref.ref.model": {"paht": "m"}}, "actor_rollout_ref.ref.model.paht", "path"),
        ({f"{MODEL}.use_liger": True}, f"{MODEL}.use_liger", "needs a GPU"),
        ({f"{ACTOR}.use_fused_kernels": True}, f"{ACTOR}.use_fused_kernels", "follows actor_rollout_ref.model"),
        (
            {f"{MODEL}.use_fused_kernels": True, f"{MODEL}.fused_kernel_options.impl_backend": "triton"},
            f"{MODEL}.fused_kernel_options.impl_backend",
            "needs CUDA: write torch with trainer.device=cpu",
        ),
        (
            {f"{MODEL}.use_fused_kernels": True, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"},
            f"{ACTOR}.kl_loss_type",
            "needs logits, which a fused head does not make",
        ),
        (
            {f"{MODEL}.use_fused_kernels": True, f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["lm_head"]},
            f"{MODEL}.target_modules",
            "remove lm_head",
        ),
        (
            {
                f"{MODEL}.override_config": {"tie_word_embeddings": True},
                f"{MODEL}.lora_rank": 8,
                f"{MODEL}.target_modules": ["q_proj", "lm_head"],
            },
            f"{MODEL}.target_modules",
            "must not name lm_head: embedding and head of the model are one tensor",
        ),
        ({f"{MODEL}.use_liger": True, "trainer.device": "cuda"}, f"{MODEL}.use_liger", "liger-kernel"),
        ({"algorithm.kl_penalty": "full"}, "algorithm.kl_penalty", "needs the distributions of both policies"),
        (
            {"algorithm.rollout_is_threshold": 2.0},
            f"{ROLLOUT}.calculate_log_probs",
            "calculate_log_probs=false: must be true with algorithm.rollout_is_threshold=2.0",
        ),
        (
            {"actor_rollout_ref.actor.use_rollout_log_probs": True},
            "actor_rollout_ref.rollout.calculate_log_probs",
            "must be true with actor_rollout_ref.actor.use_rollout_log_probs=true",
        ),
        (
            {
                "actor_rollout_ref.actor.use_rollout_log_probs": True,
                "actor_rollout_ref.rollout.calculate_log_probs": True,
                "algorithm.rollout_is_threshold": 2.0,
            },
            "algorithm.rollout_is_threshold",
            "the ratio of the loss holds the weights already",
        ),
        ({"algorithm.rollout_is": True}, "algorithm.rollout_is", "needs algorithm.rollout_is_threshold: write a limit"),
        ({"algorithm.rollout_is_level": "word"}, "algorithm.rollout_is_level", "one of token, sequence, geometric"),
        ({"algorithm.rollout_is_mode": "drop"}, "algorithm.rollout_is_mode", "one of truncate, mask, clip"),
        ({"algorithm.rollout_is_threshold": 0.5}, "algorithm.rollout_is_threshold", "must be at least 1"),
        ({"algorithm.rollout_is_veto_threshold": 2}, "algorithm.rollout_is_veto_threshold", "below 1, or null"),
        ({"data.val_files": None}, "data.val_files", "trainer.val_before_train asks for validation"),
        (
            {"data.val_files": None, "trainer.val_before_train": False, "trainer.test_freq": 5},
            "data.val_files",
            "trainer.test_freq asks for validation",
        ),
        # generation
        ({f"{ROLLOUT}.temperature": 2.5}, f"{ROLLOUT}.temperature", "at most 2.0 with vllm"),
        ({f"{ROLLOUT}.val_kwargs.temperature": 2.5}, f"{ROLLOUT}.val_kwargs.temperature", "at most 2.0 with vllm"),
        ({f"{ROLLOUT}.max_model_len": 31}, f"{ROLLOUT}.max_model_len", "at least prompt_length + response_length = 32"),
        (
            {f"{ROLLOUT}.max_num_batched_tokens": 16, f"{ROLLOUT}.enable_chunked_prefill": False},
            f"{ROLLOUT}.max_num_batched_tokens",
            "32 tokens",
        ),
        (
            {f"{ROLLOUT}.max_num_batched_tokens": 16, f"{ROLLOUT}.max_num_seqs": 17},
            f"{ROLLOUT}.max_num_batched_tokens",
            "at least max_num_seqs=17",
        ),
        ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature", "must be above 0"),
        ({f"{ROLLOUT}.val_kwargs.do_sample": True}, f"{ROLLOUT}.val_kwargs.temperature", "must be above 0"),
        ({f"{MODEL}.lora_rank": 1024}, f"{MODEL}.lora_rank", "at most 512 with vllm"),
        ({"data.max_response_length": 60}, "data.max_response_length", "exceeds the model's 64 positions: write at most 48"),
        # names
        ({"algorithm.adv_estimator": "groo"}, "algorithm.adv_estimator", "Unknown advantage estimator: it is not registered; the nearest: grpo"),
        ({f"{ACTOR}.policy_loss.loss_mode": "vanila"}, f"{ACTOR}.policy_loss.loss_mode", "the nearest: vanilla"),
        ({"reward_model.reward_manager": "naiv"}, "reward_model.reward_manager", "the nearest: naive"),
        ({f"{MODEL}.external_lib": "no_such_module"}, f"{MODEL}.external_lib", "cannot find no_such_module"),
        # files
        ({"data.train_files": "/no/rows.parquet"}, "data.train_files", "no such file"),
        ({"data.train_files": []}, "data.train_files", "a path or a list of paths"),
        ({"data.val_files": "/"}, "data.val_files", "is a folder"),
        ({f"{MODEL}.path": "/no/model"}, f"{MODEL}.path", "no such folder"),
        ({"custom_reward_function.path": "/no/reward.py"}, "custom_reward_function.path", "no such file"),
        ({"custom_reward_function.path": "reward"}, "custom_reward_function.path", "or pkg:// and the name"),
    ],
)  # fmt: skip
def test_refused(base, changes, key, message):
    found = violations(base, changes)
    assert message in found.get(key, ""), found


def test_a_warm_up_needs_a_critic(base):
    changes = {"algorithm.adv_estimator": "grpo", "trainer.critic_warmup": 2}
    assert "needs a critic" in violations(base, changes, use_critic=False)["trainer.critic_warmup"]
    assert "trainer.critic_warmup" not in violations(base, changes)


def test_functions_of_installed_modules(base):
    """The module of the recipe is read, not imported; one with lazy names cannot be told from its source."""

    def refused(path: str, name: str, **options: object) -> dict[str, str]:
        given = {"path": f"pkg://{path}", "name": name, "reward_kwargs": options}
        return violations(base, {f"custom_reward_function.{key}": value for key, value in given.items()})

    scorer = "recipe.entropy.reward_score"
    assert refused(scorer, "compute_score", allow_unisolated=True) == {}
    wrong = refused(scorer, "compute_score", unread_key=1)
    assert "unexpected keyword argument 'unread_key'" in wrong["custom_reward_function.name"]
    assert "does not define it" in refused(scorer, "absent")["custom_reward_function.name"]
    assert refused("recipe.entropy.main_entropy", "create_rl_dataset") == {}


def test_functions_of_files(base, tmp_path):
    file = tmp_path / "reward.py"
    node = {"custom_reward_function.path": str(file), "custom_reward_function.name": "score"}
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info): ...\n")
    assert violations(base, node) == {}
    file.write_text("def scores(data_source, solution_str, ground_truth, extra_info): ...\n")
    assert "it defines scores" in violations(base, node)["custom_reward_function.name"]
    file.write_text("def score(:\n")
    assert "is not valid Python" in violations(base, node)["custom_reward_function.path"]


def test_model_folders(base, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "not readable JSON" in violations(base, {f"{MODEL}.path": str(tmp_path)})[f"{MODEL}.path"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "no tokenizer" in violations(base, {f"{MODEL}.path": str(tmp_path)})[f"{MODEL}.tokenizer_path"]
    elsewhere = {f"{MODEL}.path": str(tmp_path), f"{MODEL}.tokenizer_path": "Qwen/Qwen2.5-0.5B"}
    assert violations(base, elsewhere | {"critic.model.tokenizer_path": None}) == {}
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "quantization_config": {"quant_method": "fp8"}}')
    assert "quant_method=fp8" in violations(base, elsewhere)[f"{MODEL}.path"]


def test_rows_of_a_model_with_states_are_padded(base, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    path = {f"{MODEL}.path": str(tmp_path)}
    packed = {f"{MODEL}.use_remove_padding": True, f"{MODEL}.use_prefix_sharing": True}
    assert violations(base, path) == {}
    found = violations(base, path | packed)
    assert "would carry states from one row into the next" in found[f"{MODEL}.use_remove_padding"]
    assert "the model has layers of type conv: write false" in found[f"{MODEL}.use_prefix_sharing"]
    of_critic = {"critic.model.path": str(tmp_path), "critic.model.use_remove_padding": True}
    assert "layers of type conv" in violations(base, of_critic)["critic.model.use_remove_padding"]


def test_padded_rows_share_nothing_and_a_notice_says_so(base, caplog):
    assert violations(base, {f"{ACTOR}.use_prefix_grouper": True, "critic.model.use_prefix_sharing": True}) == {}
    for key in (MODEL, "critic.model"):
        assert caplog.text.count(f"{key}.use_prefix_sharing=true ({key}.use_remove_padding=false)") == 1
    caplog.clear()
    assert violations(base, {f"{MODEL}.use_prefix_sharing": True, f"{MODEL}.use_remove_padding": True}) == {}
    assert "use_prefix_sharing" not in caplog.text


def test_a_notice_says_what_updates_draw(base, tmp_path, caplog):
    """Old log-probabilities are computed without; a model that draws nothing gets no notice."""
    sizes = {"max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "resid_pdrop": 0.1} | sizes))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    path = {f"{MODEL}.path": str(tmp_path)}
    violations(base, path)
    assert caplog.text.count("updates of the policy draw resid_pdrop=0.1, as config.json says") == 1
    caplog.clear()
    violations(base, path | {f"{MODEL}.override_config": {"resid_pdrop": 0.0}})
    violations(base, {})
    assert "updates of the policy draw" not in caplog.text


def test_vision_models(base, tmp_path):
    key = f"{ACTOR}.freeze_vision_tower"
    assert "names a text model" in violations(base, {key: True})[key]
    assert (
        "names a text model"
        in violations(base, {"critic.model.freeze_vision_tower": True})["critic.model.freeze_vision_tower"]
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    seeing = {f"{MODEL}.path": str(tmp_path), "critic.model.path": str(tmp_path)}
    assert violations(base, seeing | {key: True, "critic.model.freeze_vision_tower": True}) == {}

    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "text/tokenizer.json").write_text('{"model": {}}')
    blind = seeing | {"critic.model.path": str(tmp_path / "text")}
    assert "name a vision-language model" in violations(base, blind)["critic.model.path"]
    assert violations(base, {f"{MODEL}.path": str(tmp_path / "text"), "critic.model.path": str(tmp_path)}) == {}


@pytest.mark.parametrize(
    ("family", "engine", "told"),
    [
        ("qwen2_5_vl", "sglang", None),
        ("gemma3", "vllm", None),
        ("gemma3", "sglang", "takes no vision-language model of model_type 'gemma3', but those of qwen2_vl, "),
        ("qwen3_moe", "sglang", None),
        ("qwen3_next", "vllm", None),
        ("qwen3_next", "sglang", "runs model_type 'qwen3_next' by kernels that a CPU does not have: write vllm"),
        ("gemma2", "vllm", None),
        ("gemma2", "sglang", "runs model_type 'gemma2' by kernels that a CPU does not have: write vllm"),
    ],
)
def test_models_of_sglang(base, tmp_path, monkeypatch, family, engine, told):
    """The stand-in for SGLang's kernels, which a process that has imported SGLang finds, is none of them."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(STAND_IN)])
    vision = {"vision_config": {}} if family in ("qwen2_5_vl", "gemma3") else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **vision}))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    paths = dict.fromkeys((f"{MODEL}.path", "critic.model.path"), str(tmp_path))
    found = violations(base, paths | {"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.name": engine})
    assert found.keys() == ({f"{ROLLOUT}.name"} if told else set())
    if told:
        assert told in found[f"{ROLLOUT}.name"]


def test_vision_towers_that_several_workers_cannot_share(base, tmp_path):
    """The engine refuses them as well, but only after Ray has started."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    paths = [f"{MODEL}.path", "critic.model.path", "reward_model.model.path"]
    one = dict.fromkeys(paths, str(tmp_path)) | {"reward_model.enable": True, "trainer.n_gpus_per_node": 1}
    one |= {"reward_model.model.input_tokenizer": None, "reward_model.micro_batch_size_per_gpu": 1}
    assert violations(base, one) == {}
    found = violations(base, one | {"trainer.n_gpus_per_node": 2})
    assert found.keys() == set(paths)
    for key in paths:
        assert found[key].startswith(f"{key}={tmp_path}: is of model_type 'gemma3', which runs on one worker only")
        assert "name a model of qwen2_vl, qwen2_5_vl, " in found[key]
    own = {"reward_model.enable_resource_pool": True, "reward_model.n_gpus_per_node": 2, "reward_model.nnodes": 1}
    assert violations(base, one | own).keys() == {"reward_model.model.path"}


def test_everything_is_listed_once_under_its_dotted_key(base):
    changes = {
        f"{ROLLOUT}.name": "???",
        f"{ACTOR}.optim.lr": -1.0,
        "critic.cliprange_value": 0.0,
        "data.train_batch_size": 9,
        "trainer.device": "tpu",
        f"{ROLLOUT}.temperature": 0,
    }
    expected = {*changes} - {"data.train_batch_size"} | {f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"}
    assert set(violations(base, changes)) == expected
    with pytest.raises(ConfigError, match=f"{len(expected)} problems"):
        validate_config(changed(base, changes), True, True)


def test_roles_that_do_not_run_are_not_checked(base):
    changes = {"critic.model.path": "/no/model", "critic.ppo_micro_batch_size_per_gpu": None}
    assert violations(base, changes, use_critic=False) == {}
    changes = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": None}
    assert violations(base, changes, use_reference_policy=False) == {}


def test_keys_of_a_feature_that_is_off_are_named_and_accepted(base, caplog):
    changes = {
        f"{ROLLOUT}.multi_turn.max_assistant_turns": 3,
        f"{ROLLOUT}.multi_turn.tool_config_path": "/no/tools.yaml",
        "data.return_multi_modal_inputs": False,
    }
    assert violations(base, changes) == {}
    (message,) = caplog.messages
    for key, value in changes.items():
        assert f"{key}={as_yaml(value)}" in message and f"{ROLLOUT}.mode=sync" in message


def test_turns_need_servers_a_known_format_and_files_that_can_be_read(base, tmp_path):
    key = f"{ROLLOUT}.multi_turn"
    assert violations(base, {f"{key}.enable": True})[f"{key}.enable"].endswith("an agent loop makes the turns")
    tools, users = tmp_path / "tools.yaml", tmp_path / "users.yaml"
    tools.write_text("tools: [{class_name: verl.tools.calculator_tool.CalculatorTool, config: {type: native}}]")
    users.write_text("interaction: [{name: a, class_name: my.Interaction, config: {}}]")
    right = {f"{ROLLOUT}.mode": "async", f"{key}.enable": True, f"{key}.format": "gpt-oss"}
    right |= {f"{key}.tool_config_path": str(tools), f"{key}.interaction_config_path": str(users)}
    assert violations(base, right) == {}
    wrong = {f"{key}.format": "herms", f"{key}.tool_config_path": str(users), f"{key}.interaction_config_path": "/no"}
    found = violations(base, right | wrong)
    assert found.keys() == wrong.keys()
    assert found[f"{key}.format"].endswith("qwen3-coder (the nearest: hermes)")
    assert f"{users}: has no list under 'tools'" in found[f"{key}.tool_config_path"]
    assert "/no: cannot be read as YAML" in found[f"{key}.interaction_config_path"]
    of_a_plugin = right | {f"{key}.format": "mine", f"{MODEL}.external_lib": "json"}
    assert f"{key}.format" not in violations(base, of_a_plugin)
    found = violations(base, right | {f"{key}.tokenization_sanity_check_mode": "loose", f"{key}.max_user_turns": 0})
    assert found.keys() == {f"{key}.tokenization_sanity_check_mode", f"{key}.max_user_turns"}


def test_repetitions_need_an_agent_loop_that_reads_them(base, tmp_path):
    key, loops = f"{ROLLOUT}.multi_turn.num_repeat_rollouts", tmp_path / "loops.yaml"
    loops.write_text("[{name: mine, _target_: my.Loop}]")
    for changes in ({}, {f"{ROLLOUT}.mode": "async"}, {f"{ROLLOUT}.agent.agent_loop_config_path": str(loops)}):
        assert "collabllm_agent of recipe/collabllm" in violations(base, {key: 2} | changes)[key]
    read = {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.agent_loop_config_path": str(loops)}
    assert violations(base, {key: 2} | read) == {}
    assert violations(base, {key: 0} | read).keys() == {key}


def test_prompts_in_chunks_may_exceed_one_pass(base):
    assert violations(base, {f"{ROLLOUT}.max_num_batched_tokens": 16, f"{ROLLOUT}.max_num_seqs": 8}) == {}


def test_what_is_not_here_yet_is_refused(base):
    other = {int: 7, float: 0.5, str: "other", list: [0], dict: {"x": 1}, type(None): 1}
    run = RunConfig.parse(base)
    values = {}
    for entry in UNSUPPORTED:
        for key in [f"{entry.node}.{name}" for name in entry.names]:
            default = default_of(run, key)
            if entry.values:
                values[key] = entry.values[-1]
            elif isinstance(default, bool):
                values[key] = not default
            elif default is not ABSENT:
                values[key] = {"timeout": 1} if isinstance(default, BaseConfig) else other[type(default)]
    found = violations(base, values)
    for key in values:
        assert "supported" in found[key] and (
            "write" in found[key] or "leave it out" in found[key] or ": name" in found[key]
        )


def test_a_data_set_of_the_users_own_may_read_what_ours_does_not(base, tmp_path):
    (tmp_path / "rows.py").write_text("class Rows: pass\n")
    keys = {"data.tokenizer": "other", "data.return_raw_input_ids": True}
    own = {"data.custom_cls.path": str(tmp_path / "rows.py"), "data.custom_cls.name": "Rows"}
    assert violations(base, keys).keys() == keys.keys() and violations(base, keys | own) == {}


def test_only_unsupported_is_a_not_implemented_error(base):
    with pytest.raises(UnsupportedConfigError):
        validate_config(changed(base, {f"{ROLLOUT}.sglang_engine_mode": "server"}), True, True)
    with pytest.raises(ConfigError) as info:
        validate_config(
            changed(base, {f"{ROLLOUT}.sglang_engine_mode": "server", "data.truncation": "cut"}), True, True
        )
    assert not isinstance(info.value, NotImplementedError)


def test_names_of_the_users_own_need_a_module(base):
    changes = {"algorithm.adv_estimator": "mine", f"{MODEL}.external_lib": "json"}
    assert violations(base, changes, use_critic=False) == {}


def test_the_names_are_those_of_the_registries():
    assert set(ADV_ESTIMATORS) == set(ADV_ESTIMATOR_REGISTRY)
    own = {name for name, loss in POLICY_LOSS_REGISTRY.items() if loss.__module__.startswith("verl.")}
    assert set(POLICY_LOSSES) == own  # a recipe that another test imports may have registered more
    import verl.workers.reward_manager  # noqa: F401 (its modules register themselves)

    assert set(SCORER_CALLS) == set(REWARD_MANAGER_REGISTRY)
    assert {name for name, _ in ROLLOUT_CLASSES} == set(ROLLOUTS)
    assert all(check_kl_penalty(name) for name in KL_ESTIMATORS)


def test_validation_imports_neither_torch_nor_ray():
    code = (
        "import sys; from verl.trainer.config.validation import validate_config; import verl.trainer.config.validation;"
        "import verl.trainer.config.cli; sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_keys_without_effect_in_a_run_are_told_in_one_line(base, caplog):
    changes = {f"{ROLLOUT}.val_kwargs.temperature": 0.7, f"{ACTOR}.fsdp_config.param_offload": True}
    changes[f"{ACTOR}.kl_loss_coef"] = 0.5
    caplog.set_level("WARNING", logger="verl.trainer.config.validation")
    assert violations(base, {}) == {} and caplog.messages == []
    assert violations(base, changes) == {}
    (message,) = caplog.messages
    assert f"{ROLLOUT}.val_kwargs.temperature=0.7 ({ROLLOUT}.val_kwargs.do_sample=false)" in message
    assert f"{ACTOR}.fsdp_config.param_offload=true (trainer.device=cpu)" in message
    assert f"{ACTOR}.kl_loss_coef=0.5 ({ACTOR}.use_kl_loss=false)" in message
    caplog.clear()
    sampled = {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ACTOR}.use_kl_loss": True, "trainer.device": "cuda"}
    assert violations(base, changes | sampled) == {} and caplog.messages == []


def test_the_defaults_of_keys_that_may_be_idle_are_those_of_the_yaml(composed):
    trees = [  # with keys of recipes
        composed("actor_rollout_ref.rollout.name=vllm", base=False, name=name, folder=ROOT / "recipe/dapo/config")
        for name in ("dapo_trainer", "dapo_megatron_trainer")
    ]
    runs = [RunConfig.parse(config) for config in trees]
    trees = [OmegaConf.to_container(config, resolve=True) for config in trees]
    for idle in IDLE:
        assert select(trees[".megatron." in idle.switch], idle.switch, "absent") != "absent", idle.switch
        for name in idle.names:
            key = f"{idle.node}.{name}"
            is_megatron = idle.node.endswith(".megatron")
            default = default_of(runs[is_megatron], key)
            assert default is not ABSENT or key.startswith(("reward_model.megatron", "critic")), key
            default = select(trees[is_megatron], FOLLOWS[key]) if key in FOLLOWS else default
            if key not in OPTIONAL:  # which no YAML file holds
                assert default is ABSENT or select(trees[is_megatron], key, "absent") == default, key


@pytest.mark.parametrize(
    ("node", "sampling", "text"),
    [
        ("rollout.val_kwargs", {"n": 8}, "do_sample=false"),
        ("rollout.val_kwargs", {"n": 8, "do_sample": True, "temperature": 1.0, "top_k": 1}, "top_k=1"),
        ("rollout.val_kwargs", {"n": 8, "do_sample": True, "temperature": 1.0}, None),
        ("rollout", {"n": 4, "do_sample": False}, "do_sample=false"),
        ("rollout", {"n": 1, "do_sample": False}, None),
    ],
)
def test_equal_responses_are_told(base, caplog, node, sampling, text):
    caplog.set_level("WARNING", logger="verl.trainer.config.validation")
    violations(base, {f"actor_rollout_ref.{node}.{key}": value for key, value in sampling.items()})
    told = [message for message in caplog.messages if "the responses to a prompt are equal" in message]
    assert len(told) == (text is not None)
    assert not told or f"actor_rollout_ref.{node}.n={sampling['n']} with {text}" in told[0]
