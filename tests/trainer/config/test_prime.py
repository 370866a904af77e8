"""The configuration of the PRIME recipe: composition, defaults, and what is refused before anything starts."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from recipe.prime.config import PRIMEDataConfig, PRIMEModelConfig, PRIMERewardModelConfig
from recipe.prime.main_prime import PRIMETaskRunner, run_prime
from verl.base_config import ConfigError, WrongInput, build_node
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import examined_config, validate_config
from verl.trainer.ppo.resources import set_schedule_steps

ROOT = Path(__file__).resolve().parents[3]
MODEL = "reward_model.model"


@pytest.fixture(scope="module")
def base(composed):
    overrides = ["reward_model.micro_batch_size_per_gpu=2", "data.oversample_factor=2.0"]
    return composed(*overrides, name="prime_trainer", folder=ROOT / "recipe/prime/config")


def violations(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, False, False)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def test_what_is_right(base):
    assert violations(base, {}) == {}
    assert violations(base, {"data.key_of_a_fork": 1, "reward_model.key_of_a_fork": 1}) == {}
    assert violations(base, {f"{MODEL}.ref_type": "policy", f"{MODEL}.ref_path": None}) == {}
    assert violations(base, {"reward_model.enable": False}) == {}


def test_kl_in_the_reward_has_no_effect_and_the_notice_says_what_has(base, caplog):
    config = base.copy()
    OmegaConf.update(config, "algorithm.use_kl_in_reward", True)
    OmegaConf.update(config, "algorithm.kl_ctrl.kl_coef", 0.1)
    run = examined_config(config).checked()
    told = "algorithm.use_kl_in_reward=true (PRIME has no KL term in the reward; for one in the loss write "
    assert told + "actor_rollout_ref.actor.use_kl_loss=true)" in caplog.text
    assert "algorithm.kl_ctrl.kl_coef=0.1" in caplog.text
    assert not run.algorithm.use_kl_in_reward and not run.needs_reference
    runner = PRIMETaskRunner()
    runner.add_ref_policy_worker(config, type("Worker", (), {}))
    assert runner.mapping == {}, "no reference is built"


def test_a_step_draws_more_prompts_than_it_trains_on(base):
    run = RunConfig.parse(base)
    assert isinstance(run.data, PRIMEDataConfig)
    assert (run.data.loader_batch_size, run.prompts_per_step, run.data.train_batch_size) == (16, 8, 8)


WRONG = {
    "algorithm.adv_estimator": ("grpo", "must be rloo; PRIME has no other"),
    "data.oversample_factor": (1.3, "times data.train_batch_size=8 must be an integer, it is 10.4"),
    "data.gen_batch_size": (12, "follows data.train_batch_size and data.oversample_factor: write null"),
    "data.accuracy_lower_bound": (0.9, "must be at most data.accuracy_upper_bound=0.8"),
    f"{MODEL}.input_tokenizer": ("Qwen/Qwen2.5-0.5B", "must be null"),
    f"{MODEL}.ref_path": ("/no/such/folder", "no such folder"),
    f"{MODEL}.loss_type": ("mse", "must be one of ce, dpo, bon_acc, bon_rm"),
    f"{MODEL}.update": ("never", "must be one of before, after, reverse, none"),
    f"{MODEL}.optim.total_training_steps": (9, "is set by the trainer"),
    f"{MODEL}.beta": (1, "there is no such key"),
    "reward_model.strategy": ("megatron", "must be one of fsdp, fsdp2"),
    "reward_model.max_length": (8, "must be null"),
    "reward_model.prime_norm": ("max", "must be one of batch_norm, none"),
    "reward_model.micro_batch_size_per_gpu": (None, "set micro_batch_size_per_gpu, or use_dynamic_bsz=true"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_wrong_is_named(base, key):
    value, message = WRONG[key]
    found = violations(base, {key: value})
    assert message in found[key] and len(found) <= 2, found


def test_the_trainer_sets_the_length_of_the_schedule(base):
    """Trainer and workers read the node again after the number of steps has been written to it."""
    config = base.copy()
    set_schedule_steps(config, 9)
    assert build_node(config.reward_model, PRIMERewardModelConfig).model.optim.total_training_steps == 9


def test_a_frozen_reference_needs_a_model(base):
    assert "write ref_type=policy" in violations(base, {f"{MODEL}.ref_path": None})[f"{MODEL}.ref_path"]


def test_yaml_and_dataclasses_have_the_same_defaults(composed):
    tree = composed(name="prime_trainer", base=False, folder=ROOT / "recipe/prime/config")
    raw = OmegaConf.to_container(tree, resolve=False)
    nodes = {"data": raw["data"], "algorithm": raw["algorithm"], "reward_model": raw["reward_model"]}
    nodes |= {MODEL: raw["reward_model"]["model"], f"{MODEL}.optim": raw["reward_model"]["model"]["optim"]}
    for path, node in nodes.items():
        cls = get_class(node["_target_"])
        own = {each.name: each for each in fields(cls)} if path != "reward_model" else {}
        own |= {name: each for name, each in own.items() if name in cls.__annotations__}
        for name in cls.__annotations__.keys() & node.keys() & own.keys():
            each = own[name]
            default = each.default if each.default is not MISSING else each.default_factory()
            if not isinstance(node[name], dict | list) and "${" not in str(node[name]):
                assert node[name] == default, f"{path}.{name}"
        assert cls.__annotations__.keys() - node.keys() == set(), path


def test_the_options_of_the_reward_model_reach_its_engine():
    """Its engine cuts batches as an actor does, and builds its model as the policy's is built."""
    batches = {"micro_batch_size_per_gpu": 3, "forward_max_token_len_per_gpu": 99, "ulysses_sequence_parallel_size": 2}
    shared = {"path": "m", "tokenizer_path": "t", "external_lib": "json", "trust_remote_code": True, "use_shm": True}
    shared |= {"use_remove_padding": True, "enable_gradient_checkpointing": False, "use_fused_kernels": True}
    shared |= {"fused_kernel_options": {"impl_backend": "triton"}}
    node = PRIMERewardModelConfig(
        **batches, use_dynamic_bsz=True, model=PRIMEModelConfig(**shared, ref_path="r"), mini_batch_size=5
    )
    made = node.model.as_model_config()
    assert {name: made[name] for name in shared} == shared
    trained = node.as_trained()
    assert (trained.ppo_micro_batch_size_per_gpu, trained.ppo_max_token_len_per_gpu) == (3, 99)
    assert (trained.use_dynamic_bsz, trained.ulysses_sequence_parallel_size, trained.ppo_mini_batch_size) == (
        True,
        2,
        5,
    )
    assert (
        PRIMERewardModelConfig(micro_batch_size=7, model=PRIMEModelConfig(ref_path="r"))
        .as_trained()
        .ppo_micro_batch_size
        == 7
    )


def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_a_function_replaces_the_one_of_the_configuration(base, monkeypatch):
    seen = []
    monkeypatch.setattr("recipe.prime.main_prime.run_ppo", lambda config, runner: seen.append(config))
    run_prime(base.copy())
    run_prime(base.copy(), score)
    assert seen[0].custom_reward_function.path is None
    assert (seen[1].custom_reward_function.path, seen[1].custom_reward_function.name) == (__file__, "score")
    with pytest.raises(WrongInput, match="top level of a Python file"):
        run_prime(base.copy(), lambda *arguments: 1.0)
