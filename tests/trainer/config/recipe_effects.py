# ruff: noqa: E501 (one row per reader: it is read as a table)
"""Where the keys that a recipe adds take effect, and which keys of the main configuration it does not read.

``test_recipe_keys`` holds this against the code and the configurations. Every other key of a recipe is that of the main
configuration, whose table is ``effects.py``.
"""

from typing import NamedTuple

from tests.trainer.config.effects import (
    ACTOR,
    DATACLASSES,
    E2E,
    ENGINE,
    LOOP,
    REWARDS,
    UNCHANGED,
    Reader,
)

DAPO, PRIME, PRIME_LOSS = (
    "tests/recipe/dapo/",
    "tests/recipe/prime/test_trainer.py::",
    "tests/recipe/prime/test_algorithms.py::",
)
SPIN, SPPO = "tests/recipe/spin/test_pairs.py::", "tests/recipe/sppo/test_sppo.py::"
TRAINER, WORKER, NODES = (f"recipe/prime/{file}.py" for file in ("prime_ray_trainer", "prime_fsdp_workers", "config"))
MODEL, LOSS, KL = "reward_model.model", f"{ACTOR}.policy_loss", "algorithm.kl_ctrl"
MICRO_BATCHES = "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu"
OF_THE_MODEL = "path tokenizer_path external_lib trust_remote_code use_shm use_remove_padding use_prefix_sharing enable_gradient_checkpointing use_fused_kernels fused_kernel_options"


class Unread(NamedTuple):
    """Names below ``node`` that a recipe does not read; with ``unless``, where another key has this value."""

    node: str
    names: str
    unless: tuple[str, object] | None = None


class Recipe(NamedTuple):
    """A configuration of a recipe.

    Attributes:
        folder: the recipe.
        base: the configuration that it starts from.
        readers: readers of the keys that it adds, and of those whose usual reader it replaces.
        replaced: the usual readers, as file and expression, that it replaces: they read nothing in its runs.
        unread: what nothing reads. A run that changes such a key is refused, or told that the key has no effect.
    """

    folder: str
    base: str
    readers: tuple[Reader, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    unread: tuple[Unread, ...] = ()


# fmt: off
DYNAMIC_SAMPLING = (
    Reader("data", "gen_batch_size", "utils/dataset/config.py", "self", DAPO + "test_collect.py::test_steps_are_full_of_varied_prompts_in_the_order_of_the_data"),
    Reader("algorithm.filter_groups", "enable metric", "recipe/dapo/dapo_ray_trainer.py", "groups", DAPO + "test_collect.py::test_without_the_filter_a_step_is_one_draw"),
    Reader("algorithm.filter_groups", "max_num_gen_batches", "recipe/dapo/dynamic_sampling.py", "groups", DAPO + "test_dynamic_sampling.py::test_the_limit_is_told_with_what_to_change"),
    Reader("reward_model.overlong_buffer", "enable", "workers/rewards/managers.py", "overlong_buffer_cfg", REWARDS + "test_dapo_punishes_long_responses"),
    Reader("reward_model.overlong_buffer", "len penalty_factor log", "workers/rewards/managers.py", "self.overlong_buffer_cfg", REWARDS + "test_dapo_punishes_long_responses"),
)
DEVICES_OF_SERVERS = (
    Reader("rollout", "nnodes n_gpus_per_node", "trainer/config/rules/asynchronous.py", LOOP, "tests/recipe/one_step_off_policy/test_rules.py::test_the_established_keys_give_the_devices_of_the_servers"),
)
LENGTH_AND_SERVERS = (
    *DEVICES_OF_SERVERS,
    DYNAMIC_SAMPLING[0],
    Reader("rollout", "n total_rollout_steps total_epochs test_freq", "trainer/config/rules/asynchronous.py", LOOP, "tests/recipe/fully_async_policy/test_rules.py::test_the_keys_that_follow"),
)
ESTIMATOR, KL_PENALTY = ("trainer/ppo/ray_trainer.py", "algorithm"), ("algos/kl.py", "kl_ctrl")
POLICY_LOSS = (
    ("algos/policy_loss.py", "config"), ("algos/policy_loss.py", "config.policy_loss"), ("algos/token_loss.py", "config"),
    ("algos/selection.py", "options"),
)
NO_ESTIMATOR = Unread("algorithm", "adv_estimator gamma lam norm_adv_by_std_in_grpo")
NO_KL_IN_REWARD = (Unread("algorithm", "use_kl_in_reward kl_penalty"), Unread(KL, "type kl_coef horizon target_kl"))
NO_OTHER_LOSS = Unread(LOSS, "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef tau_pos tau_neg")
NO_CLIP = Unread(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c")

RECIPES = {
    "dapo_trainer": Recipe("recipe/dapo", "ppo_trainer", DYNAMIC_SAMPLING),
    "dapo_megatron_trainer": Recipe("recipe/dapo", "ppo_megatron_trainer", DYNAMIC_SAMPLING),
    "entropy_trainer": Recipe("recipe/entropy", "ppo_trainer", (
        *DYNAMIC_SAMPLING,
        Reader("reward_model.reward_kwargs", "max_resp_len overlong_buffer_cfg", "workers/rewards/managers.py", "self", REWARDS + "test_dapo_punishes_long_responses"),
    )),
    "fully_async_ppo_trainer": Recipe("recipe/fully_async_policy", "ppo_trainer", LENGTH_AND_SERVERS),
    "fully_async_ppo_megatron_trainer": Recipe("recipe/fully_async_policy", "ppo_megatron_trainer", LENGTH_AND_SERVERS),
    "one_step_off_ppo_trainer": Recipe("recipe/one_step_off_policy", "ppo_trainer", DEVICES_OF_SERVERS),
    "one_step_off_ppo_megatron_trainer": Recipe("recipe/one_step_off_policy", "ppo_megatron_trainer", DEVICES_OF_SERVERS),
    "prime_trainer": Recipe("recipe/prime", "ppo_trainer", (
        Reader("data", "filter_accuracy accuracy_lower_bound accuracy_upper_bound filter_truncate oversample_factor", TRAINER, "data", PRIME + "test_it_keeps_whole_prompts_the_preferred_ones_first"),
        Reader("algorithm", "reward_gt_coef reward_dpo_coef", TRAINER, "node", PRIME + "test_outcomes_alone_give_the_formula_by_hand"),
        Reader("reward_model", "prime_granularity prime_norm", WORKER, "config", PRIME_LOSS + "test_rewards_of_tokens_are_scaled_log_ratios"),
        Reader("reward_model", "mini_batch_size rollout_n", WORKER, "config", "tests/workers/roles/test_batching.py::test_a_mini_batch_is_in_prompts_and_shared_by_the_ranks"),
        Reader("reward_model", f"{MICRO_BATCHES} ulysses_sequence_parallel_size", NODES, "self", "tests/trainer/config/test_prime.py::test_the_options_of_the_reward_model_reach_its_engine"),
        Reader(MODEL, "ref_type ref_path", WORKER, "config.model", E2E + "test_prime.py::test_other_losses_and_references_train"),
        Reader(MODEL, "beta_train", WORKER, "model", PRIME_LOSS + "test_cross_entropy_by_hand"),
        Reader(MODEL, "loss_type", WORKER, "model", PRIME_LOSS + "test_pair_losses_against_loops"),
        Reader(MODEL, "update", TRAINER, "model", PRIME + "test_the_reward_model_learns_when_it_should"),
        Reader(MODEL, OF_THE_MODEL, NODES, LOOP, "tests/trainer/config/test_prime.py::test_the_options_of_the_reward_model_reach_its_engine"),
        Reader(f"{MODEL}.fused_kernel_options", "impl_backend", "workers/engine/fsdp/build.py", "self.model_config.fused_kernel_options", "tests/utils/kernel/test_linear_cross_entropy.py::test_fp32_equals_whole_logits"),
        Reader(f"{MODEL}.optim", "lr weight_decay betas lr_warmup_steps_ratio lr_warmup_steps min_lr_ratio num_cycles lr_scheduler_type", "workers/engine/fsdp/engine.py", "config", ENGINE + "test_fsdp_engine.py::test_schedules"),
        Reader(f"{MODEL}.optim", "use_checkpoint_opt_param_scheduler", "workers/engine/base.py", "self.optimizer_config", ENGINE + "test_fsdp_engine.py::test_a_resumed_run_has_the_settings_of_its_configuration"),
        Reader(f"{MODEL}.optim", "grad_clip warmup_style", "workers/config/optimizer.py", "self", DATACLASSES + "test_deprecated_spellings_are_carried_over"),
        Reader(f"{MODEL}.fsdp_config", "optimizer_offload", "workers/engine/fsdp/engine.py", "config", UNCHANGED),
    ), (
        ESTIMATOR, KL_PENALTY, ("workers/roles/reward_model.py", "config"), ("workers/roles/reward_model.py", "config.model"), ("workers/config/reward_model.py", LOOP),
    ), (
        NO_ESTIMATOR, *NO_KL_IN_REWARD,
        Unread("reward_model", "max_length"),
        Unread(MODEL, "input_tokenizer"),
        Unread(f"{MODEL}.optim", "total_training_steps"),
        Unread("data", "accuracy_lower_bound accuracy_upper_bound", ("data.filter_accuracy", False)),
        Unread("algorithm", "reward_dpo_coef", ("reward_model.enable", False)),
        Unread(MODEL, "loss_type", (f"{MODEL}.update", "none")),
        Unread(f"{MODEL}.optim", "lr weight_decay betas lr_warmup_steps_ratio lr_warmup_steps lr_scheduler_type grad_clip", (f"{MODEL}.update", "none")),
    )),
    "spin_trainer": Recipe("recipe/spin", "ppo_trainer", (
        Reader(ACTOR, "dpo_beta dpo_label_smoothing dpo_loss_type", "recipe/spin/dp_actor.py", "config", SPIN + "test_losses_by_hand"),
        Reader("trainer", "ref_update_freq", "recipe/spin/spin_trainer.py", "build_node(self.config.trainer, SPINTrainerConfig)", E2E + "test_spin.py::test_the_reference_follows_the_policy"),
    ), (
        ESTIMATOR, KL_PENALTY, *POLICY_LOSS, ("trainer/ppo/shaping.py", "algorithm"), ("workers/roles/losses.py", "config"), ("workers/roles/losses.py", "config.policy_loss"),
    ), (
        NO_ESTIMATOR, *NO_KL_IN_REWARD, NO_OTHER_LOSS, NO_CLIP,
        Unread("algorithm", "rollout_is rollout_is_threshold rollout_is_threshold_lower rollout_is_level rollout_is_mode rollout_is_veto_threshold"),
        Unread(ACTOR, "entropy_coeff loss_agg_mode use_kl_loss kl_loss_coef kl_loss_type loss_scale_factor"),
        Unread(ACTOR, "dpo_label_smoothing", (f"{ACTOR}.dpo_loss_type", "ipo")),
    )),
    "sppo_trainer": Recipe("recipe/sppo", "ppo_trainer", (
        Reader(ACTOR, "sppo_eta", "recipe/sppo/dp_actor.py", "config", SPPO + "test_the_loss_by_hand"),
        Reader("algorithm", "sppo_eta", "recipe/sppo/sppo_ray_trainer.py", "build_node(self.config.algorithm, SPPOAlgoConfig)", SPPO + "test_rewards_minus_the_soft_mean_stand_at_each_token"),
        Reader("algorithm", "use_kl_in_reward kl_penalty", "trainer/ppo/ray_trainer.py", "algorithm"),
    ), (ESTIMATOR, *POLICY_LOSS), (NO_ESTIMATOR, NO_OTHER_LOSS, NO_CLIP, Unread(ACTOR, "loss_agg_mode loss_scale_factor"))),
    "evaluation": Recipe("recipe/r1", "evaluation"),
    "ppo_trainer_split": Recipe("examples/split_placement", "ppo_trainer"),
}
# fmt: on

ANOTHER = {
    "adv_estimator": "grpo",
    "gamma": 0.5,
    "lam": 0.5,
    "norm_adv_by_std_in_grpo": False,
    "use_kl_in_reward": True,
    "kl_penalty": "abs",
    "type": "adaptive",
    "kl_coef": 0.5,
    "horizon": 5,
    "target_kl": 0.5,
    "rollout_is": True,
    "rollout_is_threshold": 2.0,
    "rollout_is_threshold_lower": 0.5,
    "rollout_is_level": "sequence",
    "rollout_is_mode": "mask",
    "rollout_is_veto_threshold": 0.1,
    "loss_mode": "gspo",
    "clip_cov_ratio": 0.5,
    "clip_cov_lb": 2.0,
    "clip_cov_ub": 9.0,
    "kl_cov_ratio": 0.5,
    "ppo_kl_coef": 0.5,
    "tau_pos": 2.0,
    "tau_neg": 2.0,
    "clip_ratio": 0.3,
    "clip_ratio_low": 0.3,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 4.0,
    "entropy_coeff": 0.1,
    "loss_agg_mode": "seq-mean-token-sum",
    "use_kl_loss": True,
    "kl_loss_coef": 0.5,
    "kl_loss_type": "abs",
    "loss_scale_factor": 4,
    "dpo_label_smoothing": 0.1,
    "max_length": 8,
    "input_tokenizer": "Qwen/Qwen2.5-0.5B",
    "total_training_steps": 9,
    "accuracy_lower_bound": 0.1,
    "accuracy_upper_bound": 0.9,
    "reward_dpo_coef": 1.0,
    "loss_type": "dpo",
    "lr": 1.0,
    "weight_decay": 0.5,
    "betas": [0.5, 0.5],
    "lr_warmup_steps_ratio": 0.5,
    "lr_warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "grad_clip": 5.0,
}
"""For each name of an unread key, a value that is no default."""
