# ruff: noqa: E501 (one row per reader: it is read as a table)
"""Where each key of ``ppo_trainer`` takes effect; ``test_every_key_has_an_effect`` holds it against the code."""

from typing import NamedTuple

LOOP = "loop"
"""In the place of an expression: the name is an item of a literal that the file reads by ``getattr`` or ``get``."""

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
OPTIMIZERS, CHECKPOINTS, MODELS = (
    (f"{ACTOR}.optim", "critic.optim"),
    (f"{ACTOR}.checkpoint", "critic.checkpoint"),
    (MODEL, "critic.model"),
)

TOOL_AGENT = "experimental/agent_loop/tool_agent_loop.py"
TURNS = "tests/experimental/agent_loop/test_tool_agent_loop.py::"
PROFILED = tuple(f"{role}.profiler" for role in (ACTOR, REF, ROLLOUT, "critic", "reward_model"))
TOOLS_OF = {
    tool: tuple(f"{role}.profiler.tool_config.{tool}" for role in (ACTOR, REF, "critic"))
    for tool in ("nsys", "npu", "torch", "torch_memory")
}
TOOLS_OF["torch"] += tuple(f"{role}.profiler.tool_config.torch" for role in (ROLLOUT, "reward_model"))
PROFILERS = "tests/utils/profiler/"
E2E, ENGINE = "tests/special_e2e/", "tests/workers/engine/"
ARGS, CONTRACT = (
    "tests/workers/rollout/test_engine_args.py::test_arguments",
    "tests/workers/rollout/test_rollout_contract.py::",
)
FEATURES, UNCHANGED = (
    E2E + "test_features.py::test_a_change_of_the_loss_is_seen",
    E2E + "test_features.py::test_a_feature_changes_no_number",
)
ROWS, LOADER = "tests/utils/dataset/test_rl_dataset.py::", "tests/utils/dataset/test_loader_and_factory.py::"
BATCHES, STATE = "tests/trainer/ppo/test_batches.py::", "tests/trainer/ppo/test_loop_state.py::"
LOSSES, POLICY_LOSSES, ROLE_LOSSES = (
    "tests/algos/test_losses.py::",
    "tests/algos/test_policy_losses.py::",
    "tests/workers/roles/test_losses.py::",
)
MANAGER, REWARDS = (
    "tests/utils/checkpoint/test_fsdp_checkpoint_manager.py::",
    "tests/workers/rewards/test_reward_managers.py::",
)
STANDALONE = E2E + "test_standalone_servers.py::test_standalone_servers_equal_the_hybrid_engine"
SCORES = "tests/workers/roles/test_reward_model.py::test_scores_are_those_of_transformers"
SANDBOX = "tests/utils/reward_score/test_code_scorers.py::"
DATACLASSES, PARTS = "tests/workers/config/test_dataclasses.py::", "tests/workers/config/test_model.py::"


class Reader(NamedTuple):
    """``file`` reads ``names`` as attributes or items of ``expression``; they stand below each of ``nodes``."""

    nodes: str | tuple[str, ...]
    names: str
    file: str
    expression: str
    test: str = ""


# fmt: off
READERS = [
    # data
    Reader("data", "train_files val_files", "trainer/ppo/loaders.py", "node", ROWS + "test_rows_of_several_files_and_messages_with_other_keys"),
    Reader("data", "prompt_key reward_fn_key image_key video_key", "utils/dataset/rl_dataset.py", "settings", ROWS + "test_column_of_the_wrong_type"),
    Reader("data", "max_prompt_length", "utils/dataset/rl_dataset.py", "settings", ROWS + "test_truncation"),
    Reader("data", "truncation", "utils/dataset/files.py", "settings", ROWS + "test_truncation"),
    Reader("data", "return_raw_chat return_full_prompt apply_chat_template_kwargs", "utils/dataset/rl_dataset.py", "settings", ROWS + "test_item_holds_every_documented_key"),
    Reader("data", "filter_overlong_prompts filter_overlong_prompts_workers", "utils/dataset/rl_dataset.py", "settings", ROWS + "test_filter_keeps_what_fits"),
    Reader("data", "return_multi_modal_inputs", "utils/dataset/rl_dataset.py", "settings", "tests/utils/dataset/test_vision_rows.py::test_batches_of_all_kinds_of_rows"),
    Reader("data", "use_shm", "utils/dataset/rl_dataset.py", "settings", "tests/utils/test_tokenizer_and_files.py::test_staging_in_shared_memory"),
    Reader("data", "shuffle seed", "utils/dataset/factory.py", "settings", LOADER + "test_epochs_and_seeds_differ_and_repeat"),
    Reader("data", "train_batch_size", "utils/dataset/config.py", "self", "tests/trainer/ppo/test_phases.py::test_prompts_of_a_step"),
    Reader("data", "val_batch_size validation_shuffle dataloader_num_workers", "trainer/ppo/loaders.py", "data", LOADER + "test_a_resumed_loader_goes_on_with_the_same_batches"),
    Reader("data.media", "image_formats", "utils/vision/limits.py", "self", "tests/utils/vision/test_images.py::test_a_key_adds_formats"),
    Reader("data.media", "max_mb", "utils/vision/limits.py", "self", "tests/utils/vision/test_images.py::test_sizes_have_limits"),
    Reader("data.media", "max_s", "utils/vision/fetching.py", "media", "tests/utils/vision/test_fetching.py::test_a_server_that_drips_is_left"),
    Reader("data.media", "any_address", "utils/vision/fetching.py", "media", "tests/utils/vision/test_fetching.py::test_the_key_allows_private_addresses"),
    Reader("data.media", "max_pixels", "utils/vision/images.py", "media", "tests/utils/vision/test_images.py::test_sizes_have_limits"),
    Reader("data.custom_cls", "path name", "utils/dataset/factory.py", LOOP, LOADER + "test_dataset_classes"),
    Reader("data.sampler", "class_path class_name", "utils/dataset/factory.py", LOOP, LOADER + "test_curriculum_sampler"),
    Reader("data.datagen", "path name", "experimental/dynamic_dataset/dynamicgen_dataset.py", LOOP, LOADER + "test_generated_rows"),
    Reader("data", "trust_remote_code", "trainer/main_ppo.py", "config.data"),
    # actor, reference, critic: model
    Reader(MODELS, "path", "workers/config/model.py", "config", ENGINE + "test_engine_contract.py::test_equals_plain_transformers"),
    Reader(MODELS, "tokenizer_path", "workers/config/model.py", "config", PARTS + "test_parts_are_loaded_on_first_use_and_can_be_given"),
    Reader(MODEL, "hf_config_path custom_chat_template", "workers/config/model.py", "config", PARTS + "test_parts_are_loaded_on_first_use_and_can_be_given"),
    Reader(MODELS, "use_shm", "workers/config/model.py", "config", "tests/utils/test_tokenizer_and_files.py::test_staging_in_shared_memory"),
    Reader(MODELS, "trust_remote_code override_config", "workers/config/model.py", "config", PARTS + "test_overrides_win_and_mappings_merge"),
    Reader(MODELS, "external_lib", "workers/config/model.py", "self", "tests/trainer/config/test_validation.py::test_names_of_the_users_own_need_a_module"),
    Reader(MODELS, "enable_gradient_checkpointing", "workers/engine/fsdp/build.py", "self.model_config", UNCHANGED),
    Reader(MODELS, "enable_activation_offload", "workers/engine/fsdp/engine.py", "self.model_config", UNCHANGED),
    Reader(MODELS, "use_remove_padding", "workers/engine/fsdp/engine.py", "self.model_config", ENGINE + "test_engine_contract.py::test_equals_plain_transformers"),
    Reader(MODELS, "use_prefix_sharing", "workers/engine/fsdp/engine.py", "self.model_config", ENGINE + "test_prefix_sharing.py::test_nothing_changes"),
    Reader(MODELS, "lora_rank lora_alpha target_modules", "workers/engine/fsdp/adapters.py", "config", ENGINE + "test_engine_contract.py::test_adapters_train_alone_and_merge"),
    Reader(MODEL, "exclude_modules", "workers/engine/fsdp/adapters.py", "config", ENGINE + "test_vision_contract.py::test_adapters_leave_out_what_is_excluded_or_frozen"),
    Reader(MODEL, "use_liger", "workers/engine/fsdp/build.py", "self.model_config", "tests/trainer/config/test_validation.py::test_refused"),
    Reader(MODEL, "use_fused_kernels", "workers/engine/fsdp/build.py", "self.model_config", ENGINE + "test_engine_contract.py::test_equals_plain_transformers"),
    Reader(f"{MODEL}.fused_kernel_options", "impl_backend", "workers/engine/fsdp/build.py", "self.model_config.fused_kernel_options", "tests/utils/kernel/test_linear_cross_entropy.py::test_fp32_equals_whole_logits"),
    # actor, reference, critic: engine
    Reader(tuple(f"{engine}.wrap_policy" for engine in ENGINES), "min_num_params", "utils/fsdp_utils.py", "policy", UNCHANGED),
    Reader(ENGINES, "forward_prefetch", "utils/fsdp_utils.py", "config"),
    Reader(ENGINES, "reshard_after_forward", "workers/engine/fsdp/build.py", "config", UNCHANGED),
    Reader(ENGINES, "offload_policy", "workers/engine/fsdp/build.py", "config", UNCHANGED),
    Reader(ENGINES, "model_dtype seed", "workers/engine/fsdp/build.py", "self.engine_config", ENGINE + "test_engine_contract.py::test_value_head"),
    Reader(ENGINES[:2], "seed", "workers/roles/base.py", "engine_config", "tests/workers/roles/test_random_state.py::test_dropout_repeats_and_a_resumed_run_takes_it_up"),
    Reader(ENGINES, "param_offload optimizer_offload", "workers/engine/fsdp/engine.py", "config", UNCHANGED),
    Reader(ENGINES[:2], "entropy_from_logits_with_chunking", "workers/engine/fsdp/engine.py", "config", "tests/utils/numerics/test_log_probs.py::test_value_and_gradient_equal_plain_log_softmax"),
    Reader(ENGINES, "fsdp_size ulysses_sequence_parallel_size", "workers/engine/fsdp/layout.py", "config", UNCHANGED),
    Reader((ACTOR, REF), "entropy_from_logits_with_chunking", "workers/roles/base.py", LOOP, UNCHANGED),
    Reader((ACTOR, REF, "critic"), "ulysses_sequence_parallel_size", "workers/roles/base.py", LOOP, UNCHANGED),
    # actor and critic: optimizer and checkpoint
    Reader(OPTIMIZERS, "lr weight_decay betas", "workers/engine/fsdp/engine.py", "config", ENGINE + "test_engine_contract.py::test_equals_plain_transformers"),
    Reader(OPTIMIZERS, "lr_warmup_steps_ratio lr_warmup_steps min_lr_ratio num_cycles lr_scheduler_type", "workers/engine/fsdp/engine.py", "config", ENGINE + "test_fsdp_engine.py::test_schedules"),
    Reader(OPTIMIZERS, "clip_grad", "workers/engine/base.py", "self.optimizer_config", DATACLASSES + "test_the_changed_gradient_limit_counts"),
    Reader(OPTIMIZERS, "use_checkpoint_opt_param_scheduler", "workers/engine/base.py", "self.optimizer_config", ENGINE + "test_fsdp_engine.py::test_a_resumed_run_has_the_settings_of_its_configuration"),
    Reader(OPTIMIZERS, "warmup_style", "workers/config/optimizer.py", "self", DATACLASSES + "test_deprecated_spellings_are_carried_over"),
    Reader(ACTOR, "grad_clip", "workers/config/actor_critic.py", "self", DATACLASSES + "test_the_changed_gradient_limit_counts"),
    Reader("critic", "grad_clip", "workers/config/actor_critic.py", "self", DATACLASSES + "test_the_changed_gradient_limit_counts"),
    Reader(CHECKPOINTS, "save_contents load_contents", "utils/checkpoint/checkpoint_manager.py", LOOP, MANAGER + "test_contents_are_respected"),
    # actor
    Reader(ACTOR, "ppo_mini_batch_size", "workers/roles/actor_rollout_ref.py", "config", "tests/workers/roles/test_batching.py::test_a_mini_batch_is_in_prompts_and_shared_by_the_ranks"),
    Reader((ACTOR, "critic"), "ppo_micro_batch_size ppo_micro_batch_size_per_gpu", "workers/roles/batching.py", "config", "tests/workers/roles/test_batching.py::test_a_micro_batch_of_one_device"),
    Reader((ACTOR, "critic"), "use_dynamic_bsz ppo_max_token_len_per_gpu", "workers/roles/batching.py", "config", UNCHANGED),
    Reader(ACTOR, "ppo_epochs shuffle", "workers/roles/batching.py", "config", FEATURES),
    Reader(ACTOR, "freeze_vision_tower", "workers/roles/actor_rollout_ref.py", "self.actor_config", ENGINE + "test_vision_contract.py::test_a_frozen_tower_keeps_its_weights"),
    Reader(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high", "algos/token_loss.py", "config", POLICY_LOSSES + "test_policy_loss_equals_slow_reference"),
    Reader(ACTOR, "clip_ratio_c", "algos/policy_loss.py", "config", POLICY_LOSSES + "test_vanilla_by_hand"),
    Reader(f"{ACTOR}.policy_loss", "loss_mode", "workers/roles/losses.py", "config.policy_loss", ROLE_LOSSES + "test_no_split_changes_a_policy_loss"),
    Reader(f"{ACTOR}.policy_loss", "clip_cov_ratio clip_cov_lb clip_cov_ub", "algos/selection.py", "options", POLICY_LOSSES + "test_selection_equals_slow_reference"),
    Reader(f"{ACTOR}.policy_loss", "kl_cov_ratio", "algos/selection.py", "options", POLICY_LOSSES + "test_selection_equals_slow_reference"),
    Reader(f"{ACTOR}.policy_loss", "ppo_kl_coef", "algos/policy_loss.py", "config.policy_loss", POLICY_LOSSES + "test_policy_loss_equals_slow_reference"),
    Reader(f"{ACTOR}.policy_loss", "tau_pos tau_neg", "algos/policy_loss.py", "config.policy_loss", POLICY_LOSSES + "test_policy_loss_equals_slow_reference"),
    Reader((ACTOR, "critic"), "loss_scale_factor", "workers/roles/losses.py", "config", ROLE_LOSSES + "test_the_configured_length_divides"),
    Reader(ACTOR, "loss_agg_mode entropy_coeff use_kl_loss kl_loss_coef kl_loss_type", "workers/roles/losses.py", "config", ROLE_LOSSES + "test_ppo_loss_is_policy_minus_entropy_plus_kl"),
    # reference
    Reader((REF, ROLLOUT), "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu", "workers/roles/actor_rollout_ref.py", "node", "tests/workers/roles/test_batching.py::test_a_micro_batch_of_one_device"),
    Reader(REF, "model", "workers/roles/actor_rollout_ref.py", "config", "tests/workers/roles/test_models_of_roles.py::test_a_reference_of_its_own_differs_in_the_keys_that_it_names"),
    Reader("actor_rollout_ref", "nccl_timeout", "workers/roles/actor_rollout_ref.py", "config", E2E + "test_faults.py::test_a_hang_ends_the_run_after_the_timeout_of_the_group"),
    Reader("critic", "nccl_timeout", "workers/roles/critic.py", "self.config", "tests/trainer/config/test_yaml.py::test_roles_of_one_process_have_one_timeout"),
    Reader("reward_model", "nccl_timeout", "workers/roles/reward_model.py", "self.config", "tests/trainer/config/test_yaml.py::test_roles_of_one_process_have_one_timeout"),
    # critic
    Reader("critic", "rollout_n ppo_mini_batch_size", "workers/roles/critic.py", "config", "tests/workers/roles/test_batching.py::test_a_mini_batch_is_in_prompts_and_shared_by_the_ranks"),
    Reader("critic", "forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu", "workers/roles/critic.py", "config", "tests/workers/roles/test_batching.py::test_a_micro_batch_of_one_device"),
    Reader("critic", "ppo_epochs shuffle", "workers/roles/batching.py", "config", E2E + "test_train.py::test_ppo_with_a_critic_on_two_workers_with_tensor_parallel_generation"),
    Reader("critic", "cliprange_value loss_agg_mode", "workers/roles/losses.py", "config", ROLE_LOSSES + "test_value_loss_by_its_definition"),
    Reader("critic", "enable", "trainer/ppo/utils.py", "config.critic", "tests/trainer/run/test_launch.py::test_who_needs_a_critic"),
    # rollout
    Reader(ROLLOUT, "name mode", "workers/rollout/__init__.py", "config", "tests/workers/rollout/test_engine_args.py::test_unknown_rollouts"),
    Reader(ROLLOUT, "n", "trainer/ppo/rollouts.py", "self._run.actor_rollout_ref.rollout", "tests/trainer/ppo/test_rollout_skip.py::test_rollouts_are_kept_per_step_and_prompts"),
    Reader(ROLLOUT, "skip_rollout", "trainer/ppo/rollouts.py", "run.actor_rollout_ref.rollout", "tests/trainer/ppo/test_rollout_skip.py::test_rollouts_are_kept_per_step_and_prompts"),
    Reader(ROLLOUT, "skip_dump_dir", "trainer/ppo/rollout_skip.py", "rollout", "tests/trainer/ppo/test_rollout_skip.py::test_rollouts_are_kept_per_step_and_prompts"),
    Reader((ROLLOUT, f"{ROLLOUT}.val_kwargs"), "temperature top_k top_p", "workers/rollout/base.py", LOOP, CONTRACT + "test_greedy_and_validation"),
    Reader(ROLLOUT, "repetition_penalty do_sample", "workers/rollout/base.py", "config", CONTRACT + "test_greedy_and_validation"),
    Reader(f"{ROLLOUT}.val_kwargs", "n do_sample", "trainer/ppo/rollouts.py", "options", E2E + "test_train.py::test_grpo_runs_and_rollout_and_trainer_agree"),
    Reader(ROLLOUT, "prompt_length response_length max_num_batched_tokens", "workers/rollout/engine_settings.py", "config", "tests/workers/rollout/test_engine_args.py::test_sizes_that_cannot_work"),
    Reader(ROLLOUT, "max_model_len", "workers/config/rollout.py", "self", "tests/workers/rollout/test_engine_args.py::test_sizes_that_cannot_work"),
    Reader(ROLLOUT, "dtype load_format seed max_num_seqs enable_chunked_prefill enable_prefix_caching tensor_model_parallel_size", "workers/rollout/vllm_rollout/engine_args.py", "config", ARGS),
    Reader(ROLLOUT, "gpu_memory_utilization", "workers/rollout/engine_settings.py", "config", "tests/workers/rollout/test_engine_args.py::test_cache_of_what_all_sequences_need"),
    Reader(ROLLOUT, "enforce_eager cudagraph_capture_sizes free_cache_engine expert_parallel_size disable_log_stats skip_tokenizer_init", "workers/rollout/vllm_rollout/engine_args.py", "config", ARGS),
    Reader(f"{ROLLOUT}.agent", "num_workers", "experimental/agent_loop/manager.py", "self.rollout_config.agent", "tests/special_e2e/test_async_rollout.py::test_single_turn_loops_equal_the_synchronous_rollout"),
    Reader(f"{ROLLOUT}.agent", "default_agent_loop", "workers/config/rollout.py", "self.agent", "tests/experimental/agent_loop/test_worker.py::test_loops_of_a_file"),
    Reader(f"{ROLLOUT}.agent", "agent_loop_config_path", "experimental/agent_loop/worker.py", "agent", "tests/experimental/agent_loop/test_worker.py::test_loops_of_a_file"),
    Reader(f"{ROLLOUT}.multi_turn", "enable", "workers/config/rollout.py", "self.multi_turn", TURNS + "test_the_loop_of_rows_without_a_name"),
    Reader(f"{ROLLOUT}.multi_turn", "format", TOOL_AGENT, "node", TURNS + "test_a_call_and_its_answer"),
    Reader(f"{ROLLOUT}.multi_turn", "tool_config_path", "tools/utils/tool_registry.py", "turns", TURNS + "test_a_call_and_its_answer"),
    Reader(f"{ROLLOUT}.multi_turn", "interaction_config_path", TOOL_AGENT, "node", TURNS + "test_a_conversation_with_a_user"),
    Reader(f"{ROLLOUT}.multi_turn", "max_assistant_turns max_user_turns", TOOL_AGENT, "self.settings", TURNS + "test_when_a_trajectory_ends"),
    Reader(f"{ROLLOUT}.multi_turn", "max_parallel_calls", TOOL_AGENT, "self.settings", TURNS + "test_the_first_calls_run_and_the_rest_do_not"),
    Reader(f"{ROLLOUT}.multi_turn", "max_tool_response_length tool_response_truncate_side", TOOL_AGENT, "self.settings", TURNS + "test_long_answers_are_cut"),
    Reader(f"{ROLLOUT}.multi_turn", "num_repeat_rollouts", "recipe/collabllm/collabllm_agent_loop.py", "self.settings", "tests/recipe/test_collabllm.py::test_conversations_go_on_from_the_first_turn"),
    Reader(f"{ROLLOUT}.multi_turn", "use_inference_chat_template", TOOL_AGENT, "self.settings", TURNS + "test_a_template_that_strips_thoughts"),
    Reader(f"{ROLLOUT}.multi_turn", "tokenization_sanity_check_mode", TOOL_AGENT, "self.settings", TURNS + "test_the_first_difference_from_the_template_is_logged"),
    Reader(f"{ROLLOUT}.agent", "on_failure num_retries trajectory_timeout_s step_timeout_s", "experimental/agent_loop/batch.py", "agent", "tests/experimental/agent_loop/test_attempts.py::test_validation_and_baselines_cannot_lose_rows"),
    Reader(f"{ROLLOUT}.agent", "turn_timeout_s", "experimental/agent_loop/servers.py", "agent", "tests/experimental/agent_loop/test_servers.py::test_a_request_has_a_deadline_and_a_cancelled_one_is_aborted"),
    Reader(f"{ROLLOUT}.agent", "server_timeout_s", "experimental/agent_loop/servers.py", "agent", "tests/experimental/agent_loop/test_servers.py::test_a_server_that_is_gone_loses_its_requests_to_others"),
    Reader(f"{ROLLOUT}.agent", "tool_timeout_s", "experimental/agent_loop/tool_agent_loop.py", "rollout.agent", "tests/experimental/agent_loop/test_tool_agent_loop.py::test_a_call_that_fails_is_told_to_the_model"),
    Reader(ROLLOUT, "over_sample_rate", "experimental/agent_loop/batch.py", "rollout", "tests/experimental/agent_loop/test_attempts.py::test_over_sampling_gives_up_the_last_ones"),
    Reader("actor_rollout_ref", "hybrid_engine", "trainer/ppo/resources.py", "node", STANDALONE),
    Reader(ROLLOUT, "nnodes n_gpus_per_node", "workers/rollout/standalone.py", "config", STANDALONE),
    Reader(f"{ROLLOUT}.server", "max_start_wait_time", "workers/rollout/server_replica.py", "self.config.server", "tests/workers/rollout/test_standalone.py::test_servers_that_die_are_replaced"),
    Reader(f"{ROLLOUT}.server", "heartbeat_timeout", "workers/rollout/engine_server.py", "self.config.server", "tests/workers/rollout/test_server_contract.py::test_nobody_waits_for_an_engine_that_has_failed"),
    Reader(f"{ROLLOUT}.agent.custom_async_server", "path name", "workers/rollout/standalone.py", "custom", "tests/workers/rollout/test_standalone.py::test_classes_of_the_user"),
    Reader(ROLLOUT, "batch_invariant", "workers/rollout/engine_settings.py", "config", CONTRACT + "test_a_response_does_not_depend_on_the_others_of_its_batch"),
    Reader(f"{ROLLOUT}.engine_kwargs", "vllm", "workers/rollout/vllm_rollout/engine_args.py", "config.engine_kwargs", ARGS),
    Reader(f"{ROLLOUT}.engine_kwargs", "sglang", "workers/rollout/sglang_rollout/engine_args.py", "config.engine_kwargs", "tests/workers/rollout/test_engine_args.py::test_arguments_of_sglang"),
    Reader(ROLLOUT, "ignore_eos", "workers/rollout/base.py", "self.config", CONTRACT + "test_mask_follows_what_was_sampled"),
    Reader(ROLLOUT, "calculate_log_probs", "workers/rollout/vllm_rollout/vllm_rollout.py", "self.config", CONTRACT + "test_mask_follows_what_was_sampled"),
    Reader(ROLLOUT, "layered_summon", "workers/rollout/vllm_rollout/vllm_rollout.py", "config"),
    Reader(ROLLOUT, "update_weights_bucket_megabytes", "workers/sharding_manager/__init__.py", "rollout.config", "tests/workers/sharding_manager/test_bucket.py::test_buckets_keep_the_order_and_the_limit"),
    Reader(ROLLOUT, "share_weights", "workers/roles/actor_rollout_ref.py", "self.rollout_config", "tests/workers/sharding_manager/test_shared_weights.py::test_steps_and_syncs"),
    # reward
    Reader("reward_model", "enable", "trainer/main_ppo.py", "reward", E2E + "test_reward_models.py::test_a_reward_model_scores_training"),
    Reader("reward_model", "enable_resource_pool n_gpus_per_node nnodes", "trainer/main_ppo.py", "reward", E2E + "test_reward_models.py::test_workers_of_its_own_change_no_number"),
    Reader("reward_model", "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu max_length", "workers/roles/reward_model.py", "config", SCORES),
    Reader("reward_model", "ulysses_sequence_parallel_size", "workers/roles/base.py", LOOP, SCORES),
    Reader("reward_model.model", "path use_remove_padding use_prefix_sharing trust_remote_code use_shm external_lib", "workers/config/reward_model.py", LOOP, SCORES),
    Reader("reward_model.model", "input_tokenizer", "workers/roles/reward_model.py", "config.model", SCORES),
    Reader("reward_model.model.fsdp_config", "param_offload", "workers/engine/fsdp/engine.py", "config", SCORES),
    Reader("reward_model.model.fsdp_config", "reshard_after_forward", "workers/engine/fsdp/build.py", "config"),
    Reader("reward_model.model.fsdp_config", "fsdp_size", "workers/engine/fsdp/layout.py", "config", SCORES),
    Reader("reward_model.model.fsdp_config", "forward_prefetch", "utils/fsdp_utils.py", "config"),
    Reader("reward_model.model.fsdp_config.wrap_policy", "min_num_params", "utils/fsdp_utils.py", "policy"),
    Reader("reward_model", "launch_reward_fn_async", "trainer/ppo/reward.py", "options"),
    Reader("reward_model", "reward_manager", "workers/rewards/loading.py", "node", REWARDS + "test_custom_manager_registered_by_the_file"),
    Reader("reward_model", "reward_kwargs", "workers/rewards/loading.py", "node", REWARDS + "test_dapo_punishes_long_responses"),
    Reader("reward_model.scoring", "failure_score timeout_s batch_timeout_s max_failed_ratio", "workers/rewards/scoring.py", "limits", REWARDS + "test_limits_come_from_the_configuration"),
    Reader("reward_model.scoring", "isolate", "workers/rewards/loading.py", "scoring", REWARDS + "test_a_custom_scorer_cannot_end_or_stop_this_process"),
    Reader("reward_model.sandbox_fusion", "url max_concurrent memory_limit_mb", "workers/rewards/loading.py", "remote", SANDBOX + "test_the_configuration_reaches_the_service"),
    Reader("reward_model.local_sandbox", "timeout_s allow_unisolated", "workers/rewards/loading.py", "local", SANDBOX + "test_the_configuration_reaches_the_local_sandbox"),
    Reader("custom_reward_function", "path name reward_kwargs", "workers/rewards/loading.py", "node", REWARDS + "test_custom_function_with_kwargs"),
    # algorithm
    # async_training
    Reader("async_training", "staleness_threshold trigger_parameter_sync_step max_off_policy_threshold off_policy_strategy", "trainer/asynchronous/trainer.py", "options", "tests/trainer/asynchronous/test_pacing.py::test_room"),
    Reader("async_training", "partial_rollout replay", "trainer/asynchronous/trainer.py", "self._options", "tests/trainer/asynchronous/test_trainer.py::test_a_replay_follows_the_ledger_and_finds_other_weights"),
    Reader("async_training", "mode", "trainer/config/async_training.py", "self", "tests/recipe/fully_async_policy/test_rules.py::test_settings_that_forbid_overlap_are_refused"),
    Reader("async_training", "require_batches use_rollout_log_probs", "trainer/config/rules/asynchronous.py", "pace", "tests/recipe/fully_async_policy/test_rules.py::test_the_keys_that_follow"),
    Reader("algorithm", "gamma lam adv_estimator", "trainer/ppo/ray_trainer.py", "algorithm", BATCHES + "test_gae_gets_values_and_discounts"),
    Reader("algorithm", "norm_adv_by_std_in_grpo", "trainer/ppo/ray_trainer.py", "algorithm", BATCHES + "test_group_advantages_by_hand"),
    Reader("algorithm", "use_kl_in_reward kl_penalty", "trainer/ppo/ray_trainer.py", "algorithm", BATCHES + "test_kl_in_the_reward_by_hand"),
    Reader("algorithm.kl_ctrl", "type kl_coef horizon target_kl", "algos/kl.py", "kl_ctrl", LOSSES + "test_kl_controllers"),
    Reader("algorithm", "rollout_is_threshold rollout_is_threshold_lower rollout_is_level rollout_is_mode rollout_is_veto_threshold rollout_is", "trainer/ppo/shaping.py", "algorithm", "tests/trainer/ppo/test_rollout_is_integration.py::test_every_key_reaches_the_weights"),
    Reader("algorithm", "use_pf_ppo", "trainer/ppo/shaping.py", "config"),
    Reader("algorithm.pf_ppo", "reweight_method weight_pow", "trainer/ppo/shaping.py", "options", "tests/algos/test_pf_ppo.py::test_weights"),
    # trainer
    Reader("trainer", "total_epochs total_training_steps", "trainer/ppo/ray_trainer.py", "options", STATE + "test_the_data_end_after_the_last_epoch_where_no_number_of_steps_is_given"),
    Reader("trainer", "seed", "trainer/ppo/ray_trainer.py", "run.trainer", STATE + "test_every_draw_starts_from_its_own_random_state"),
    Reader("trainer", "balance_batch", "trainer/ppo/ray_trainer.py", "self.run_config.trainer", BATCHES + "test_balanced_rows_can_be_put_back"),
    Reader("trainer", "lazy_columns", "trainer/ppo/rollouts.py", "self._run.trainer", "tests/trainer/ppo/test_columns.py::test_a_step_by_reference_equals_the_plain_step"),
    Reader("trainer", "rollout_data_dir", "trainer/ppo/ray_trainer.py", "self.run_config.trainer", STATE + "test_dumps_are_in_the_order_in_which_rows_were_asked_for"),
    Reader("trainer", "val_before_train val_only test_freq", "trainer/ppo/course.py", "self._options", E2E + "test_train.py::test_grpo_runs_and_rollout_and_trainer_agree"),
    Reader("trainer", "critic_warmup", "trainer/ppo/ray_trainer.py", "self.run_config.trainer", E2E + "test_train.py::test_ppo_with_a_critic_on_two_workers_with_tensor_parallel_generation"),
    Reader("trainer", "save_freq", "trainer/ppo/checkpoint.py", "options", E2E + "test_train.py::test_a_run_goes_on_bit_for_bit_after_sigterm_and_after_the_death_of_a_worker"),
    Reader("trainer", "esi_redundant_time", "trainer/ppo/checkpoint.py", "options", "tests/utils/checkpoint/test_files.py::test_early_save"),
    Reader("trainer", "save_on_sigterm_s", "trainer/main_ppo.py", "options", E2E + "test_train.py::test_a_run_goes_on_bit_for_bit_after_sigterm_and_after_the_death_of_a_worker"),
    Reader("trainer", "worker_call_timeout_s", "trainer/ppo/resources.py", "run.trainer", "tests/single_controller/test_faults.py::test_stopped_worker_meets_the_deadline"),
    Reader("trainer", "resume_mode resume_from_path default_hdfs_dir", "trainer/run/resume.py", "trainer", STATE + "test_where_a_run_resumes_from"),
    Reader("trainer", "trusted_classes", "trainer/run/resume.py", "run.trainer", STATE + "test_a_prepared_or_renamed_checkpoint_is_refused_before_ray_starts"),
    Reader("trainer", "default_local_dir", "trainer/run/resume.py", "config.trainer", STATE + "test_where_a_run_resumes_from"),
    Reader("trainer", "del_local_ckpt_after_load", "trainer/ppo/checkpoint.py", "options"),
    Reader("trainer", "max_actor_ckpt_to_keep max_critic_ckpt_to_keep", "trainer/ppo/checkpoint.py", "options", MANAGER + "test_retention"),
    Reader("trainer", "log_val_generations validation_data_dir", "trainer/ppo/ray_trainer.py", "self.run_config.trainer", STATE + "test_dumps_are_in_the_order_in_which_rows_were_asked_for"),
    Reader("trainer", "project_name experiment_name", "trainer/run/output.py", "options", "tests/utils/observe/test_tracking.py::test_file_holds_one_object_per_step"),
    Reader("trainer", "logger", "trainer/config/run_config.py", "self", "tests/utils/observe/test_tracking.py::test_file_holds_one_object_per_step"),
    Reader("trainer", "timeline_steps", "trainer/ppo/run_records.py", "options", "tests/special_e2e/test_async_rollout.py::test_a_run_with_tools"),
    Reader("trainer", "record_samples record_digests", "trainer/ppo/run_records.py", "options", "tests/trainer/ppo/test_step_record.py::test_details_of_a_step"),
    Reader("trainer", "prometheus", "trainer/run/output.py", "options", "tests/trainer/run/test_prometheus.py::test_gauges_by_name_and_tags"),
    Reader(f"{ROLLOUT}.trace", "backend token2text", "trainer/ppo/run_records.py", "trace", "tests/utils/observe/test_rollout_trace.py::test_every_response_becomes_a_trace"),
    Reader("trainer", "report", "trainer/run/output.py", "options", "tests/utils/report/test_report.py::test_a_run_ends_with_a_report"),
    Reader("trainer", "live_view", "trainer/main_ppo.py", "run_config.trainer", "tests/utils/report/test_live.py::test_what_a_terminal_shows"),
    Reader("trainer", "nnodes n_gpus_per_node device", "trainer/main_ppo.py", "config.trainer", BATCHES + "test_pools_count_worker_processes"),
    Reader("trainer", "ray_wait_register_center_timeout", "trainer/ppo/resources.py", "run.trainer", "tests/single_controller/test_worker_group.py::test_placement_that_cannot_be_met_is_refused"),
    # profilers
    Reader("global_profiler", "steps", "trainer/ppo/ray_trainer.py", "profiler", PROFILERS + "test_driver.py::test_which_steps_start_and_stop"),
    Reader("global_profiler", "profile_continuous_steps", "trainer/ppo/profiling.py", "profiler", PROFILERS + "test_driver.py::test_which_steps_start_and_stop"),
    Reader("global_profiler", "tool save_path", "trainer/main_ppo.py", "profiler", PROFILERS + "test_nsys.py::test_options_are_those_that_ray_makes_a_command_of"),
    Reader(PROFILED, "enable tool all_ranks ranks", "utils/profiler/config.py", "self", PROFILERS + "test_profile.py::test_which_ranks_are_profiled"),
    Reader(PROFILED, "save_path", "utils/profiler/profile.py", "config", PROFILERS + "test_torch_trace.py::test_one_trace_per_role_rank_and_step"),
    Reader((f"{ROLLOUT}.profiler.tool_config", "reward_model.profiler.tool_config"), "nsys npu torch_memory", "utils/profiler/profile.py", LOOP, PROFILERS + "test_torch_trace.py::test_one_trace_per_role_rank_and_step"),
    Reader((*TOOLS_OF["nsys"], *TOOLS_OF["npu"]), "discrete", "utils/profiler/captures.py", "self.options", PROFILERS + "test_nsys.py::test_captures_of_a_step_and_of_a_task"),
    Reader(TOOLS_OF["npu"], "contents level analysis", "utils/profiler/captures.py", "options", PROFILERS + "test_npu.py::test_options_reach_the_profiler_of_torch_npu"),
    Reader("global_profiler", "relocate_results finish_hook_cmd finish_hook_all_ranks finish_hook_ranks", "trainer/ppo/profiling.py", "profiler", PROFILERS + "test_results.py::test_what_follows_the_last_profiled_step"),
    Reader(TOOLS_OF["torch"], "contents", "utils/profiler/torch_trace.py", "self.options", PROFILERS + "test_torch_trace.py::test_contents"),
    Reader(TOOLS_OF["torch"], "discrete", "utils/profiler/torch_trace.py", "self.options", PROFILERS + "test_torch_trace.py::test_a_trace_for_each_task"),
    Reader(TOOLS_OF["torch"], "skip_first wait warmup active repeat", "utils/profiler/torch_trace.py", "options", PROFILERS + "test_torch_trace.py::test_cycles_of_mini_batches"),
    Reader(TOOLS_OF["torch"], "step_start step_end", "utils/profiler/torch_trace.py", "options", PROFILERS + "test_torch_trace.py::test_only_some_mini_batches"),
    Reader(TOOLS_OF["torch_memory"], "trace_alloc_max_entries stack_depth context stacks kw_args", "utils/profiler/memory.py", "options", PROFILERS + "test_torch_memory.py::test_options_reach_the_recorder_and_snapshots_their_place"),
    # Ray
    Reader("ray_kwargs.ray_init", "num_cpus", "trainer/run/launch.py", LOOP, "tests/trainer/run/test_launch.py::test_ray_is_local_unless_an_address_is_given"),
    Reader("ray_kwargs", "timeline_json_file", "trainer/run/launch.py", "cluster"),
    Reader("ray_kwargs", "fork_workers", "trainer/config/rules/fork_workers.py", "run.ray_kwargs", "tests/special_e2e/test_fork_workers.py::test_forks_change_no_bit"),
]
# fmt: on

FOLLOWED = {
    f"{ACTOR}.use_prefix_grouper": f"{MODEL}.use_prefix_sharing",
    "data.max_response_length": f"{ROLLOUT}.response_length",
    "global_profiler.global_tool_config.nsys.discrete": f"{ACTOR}.profiler.tool_config.nsys.discrete",
    **{
        f"global_profiler.global_tool_config.torch_memory.{name}": f"{ACTOR}.profiler.tool_config.torch_memory.{name}"
        for name in ("trace_alloc_max_entries", "stack_depth", "context", "stacks", "kw_args")
    },
}
"""Keys that are read through one whose default is an interpolation of them."""

ONE_IMPLEMENTATION = {
    "trainer/config/ppo_trainer.yaml": ("trainer.use_legacy_worker_impl",),
    "trainer/config/rollout/rollout.yaml": (f"{ROLLOUT}.multi_stage_wake_up",),
    "trainer/config/engine/fsdp.yaml": tuple(
        f"{engine}.{name}" for engine in ENGINES for name in ("strategy", "use_orig_params", "use_torch_compile", "entropy_checkpointing")
    ) + (f"{REF}.fsdp_config.forward_only",),
    "trainer/config/actor/actor.yaml": (f"{ACTOR}.use_torch_compile",),
    "trainer/config/actor/dp_actor.yaml": (f"{ACTOR}.strategy", f"{ACTOR}.entropy_checkpointing"),
    "trainer/config/ref/ref.yaml": (f"{REF}.strategy", f"{REF}.use_torch_compile"),
    "trainer/config/ref/dp_ref.yaml": (f"{REF}.entropy_checkpointing",),
    "trainer/config/critic/dp_critic.yaml": ("critic.strategy",),
    "trainer/config/reward_model/dp_reward_model.yaml": ("reward_model.strategy", "reward_model.model.use_fused_kernels"),
}  # fmt: skip
"""YAML file -> keys that select between implementations of which there is one; the comment there says so."""

REFUSED = {
    f"{ACTOR}.use_remove_padding": True,
    f"{ACTOR}.use_fused_kernels": True,
    f"{ROLLOUT}.pipeline_model_parallel_size": 2,
    **{f"{node}.async_save": True for node in CHECKPOINTS},
    **{f"{node}.total_training_steps": 9 for node in OPTIMIZERS},
}
"""Keys that a rule holds at their default, and a value that it refuses; ``REFUSALS`` in the code lists the others."""

IDLE_WITH_SGLANG = {
    f"{ROLLOUT}.layered_summon": True,
    f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 1},
    f"{ROLLOUT}.over_sample_rate": 0.1,
    f"{ROLLOUT}.multi_turn.max_assistant_turns": 3,
}
"""Keys that have no effect with SGLang and ``mode=sync``, and a value for which a warning says so."""

REFUSED_BY_SGLANG = {
    f"{ROLLOUT}.engine_kwargs.sglang": {"mem_fraction_statc": 0.5},
    f"{ROLLOUT}.engine_kwargs.sglang.nnodes": 2,
    f"{ROLLOUT}.engine_kwargs.sglang.tp_size": 2,
    f"{ROLLOUT}.pipeline_model_parallel_size": 2,
    f"{ROLLOUT}.data_parallel_size": 2,
    f"{ROLLOUT}.expert_parallel_size": 4,
    f"{ROLLOUT}.repetition_penalty": 2.5,
    f"{ROLLOUT}.temperature": 0,
    f"{ROLLOUT}.max_model_len": 8,
    f"{ROLLOUT}.sglang_engine_mode": "server",
    **{f"{ROLLOUT}.server.{name}": 7 for name in ("timeout", "max_attempts", "retry_delay", "max_connections")},
}
"""Keys that cannot work with SGLang on the trainer's devices, and a value that is refused."""

SGLANG_TAKES = "tests/workers/rollout/test_engine_args.py::test_each_key_becomes_an_argument_of_sglang"
SGLANG_ARGS, SGLANG_ROLLOUT = (
    f"workers/rollout/sglang_rollout/{name}.py" for name in ("engine_args", "sglang_rollout")
)
# fmt: off
SGLANG = [
    Reader(ROLLOUT, "load_format seed max_num_seqs enable_chunked_prefill enable_prefix_caching tensor_model_parallel_size", SGLANG_ARGS, "config", SGLANG_TAKES),
    Reader(ROLLOUT, "enforce_eager cudagraph_capture_sizes free_cache_engine expert_parallel_size disable_log_stats skip_tokenizer_init", SGLANG_ARGS, "config", SGLANG_TAKES),
    Reader(ROLLOUT, "gpu_memory_utilization max_num_batched_tokens batch_invariant data_parallel_size", SGLANG_ARGS, "config", SGLANG_TAKES),
    Reader(ROLLOUT, "dtype", "workers/rollout/engine_settings.py", "config", SGLANG_TAKES),
    Reader(f"{ROLLOUT}.engine_kwargs", "sglang", SGLANG_ARGS, "config.engine_kwargs", SGLANG_TAKES),
    Reader(ROLLOUT, "calculate_log_probs", SGLANG_ROLLOUT, "self.config", CONTRACT + "test_mask_follows_what_was_sampled"),
    Reader(f"{ROLLOUT}.server", "heartbeat_timeout max_start_wait_time", SGLANG_ROLLOUT, "self.config.server", E2E + "test_sglang.py::test_a_death_ends_the_run_by_name"),
]
# fmt: on
"""Where SGLang reads what vLLM reads elsewhere; what it does not read is refused with it."""

# fmt: off
PASSED_ON = [
    Reader("global_profiler.global_tool_config.nsys", "controller_nsight_options", "trainer/main_ppo.py", "(profiler.global_tool_config or {})['nsys']", PROFILERS + "test_nsys.py::test_options_are_those_that_ray_makes_a_command_of"),
    Reader("global_profiler.global_tool_config.nsys", "worker_nsight_options", "trainer/ppo/profiling.py", "(profiler.global_tool_config or {})['nsys']", PROFILERS + "test_nsys.py::test_only_profiled_ranks_are_wrapped"),
]
# fmt: on
"""Nodes that are handed to another program as they are, with all that is below them."""

# ---- ppo_megatron_trainer: its replacements for keys of ppo_trainer

LAYOUTS = tuple(f"{node}.megatron" for node in (ACTOR, REF, "critic", "reward_model"))
CONTRACT_MEGATRON, MEGATRON_ENGINE = ENGINE + "test_megatron_contract.py::", ENGINE + "test_megatron_engine.py::"
MEGATRON_FUSED = ENGINE + "test_megatron_fused.py::"
# fmt: off
MEGATRON = [
    Reader(LAYOUTS, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size", "workers/engine/megatron/layout.py", LOOP, CONTRACT_MEGATRON + "test_equals_plain_transformers"),
    Reader(LAYOUTS, "virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size seed", "workers/engine/megatron/layout.py", "config", CONTRACT_MEGATRON + "test_equals_plain_transformers"),
    Reader(LAYOUTS, "sequence_parallel", "workers/engine/megatron/build.py", LOOP, CONTRACT_MEGATRON + "test_equals_plain_transformers"),
    Reader(LAYOUTS, "use_distributed_optimizer override_ddp_config", "workers/engine/megatron/build.py", "config", CONTRACT_MEGATRON + "test_three_steps_of_adamw"),
    Reader(LAYOUTS, "dtype", "workers/engine/megatron/build.py", "config", MEGATRON_ENGINE + "test_half_precision_keeps_an_fp32_copy"),
    Reader(LAYOUTS, "use_dist_checkpointing dist_checkpointing_path", "workers/engine/megatron/build.py", "self.engine_config", "tests/scripts/test_converter_hf_to_mcore.py::test_engines_start_from_what_was_converted"),
    Reader(LAYOUTS, "use_mbridge", "workers/engine/megatron/build.py", "self.engine_config", "tests/workers/engine/test_megatron_bridge.py::test_a_bridged_model_computes_and_trains_what_the_tables_do"),
    Reader(LAYOUTS, "share_model_files", "workers/engine/megatron/build.py", "self.engine_config", "tests/workers/engine/test_megatron_helpers.py::test_a_worker_without_files_gets_its_parts_and_no_more"),
    Reader((ACTOR, REF), "load_weight", "workers/roles/base.py", "config", "tests/workers/engine/test_megatron_engine.py::test_weights_come_from_the_seed_where_none_are_loaded"),
    Reader("critic", "load_weight", "workers/roles/base.py", "config", "tests/workers/engine/test_megatron_engine.py::test_weights_come_from_the_seed_where_none_are_loaded"),
    Reader("reward_model", "load_weight", "workers/roles/base.py", "config", "tests/workers/engine/test_megatron_engine.py::test_weights_come_from_the_seed_where_none_are_loaded"),
    Reader(CHECKPOINTS, "async_save", "utils/checkpoint/megatron_checkpoint_manager.py", "config", "tests/utils/checkpoint/test_megatron_checkpoint_manager.py::test_training_goes_on_while_a_rank_writes"),
    Reader(LAYOUTS, "override_transformer_config", "workers/engine/megatron/build.py", "config", MEGATRON_ENGINE + "test_recompute_computes_layers_again"),
    Reader(MODEL, "use_fused_kernels", "workers/engine/megatron/build.py", "self.model_config", MEGATRON_FUSED + "test_equals_plain_transformers"),
    Reader(f"{MODEL}.fused_kernel_options", "impl_backend", "workers/engine/megatron/build.py", "self.model_config.fused_kernel_options", MEGATRON_FUSED + "test_triton_is_refused_where_it_cannot_run"),
    Reader(LAYOUTS, "param_offload grad_offload optimizer_offload", "workers/engine/megatron/engine.py", "config", "tests/workers/engine/test_megatron_engine.py::test_offload_frees_each_part_by_its_own_switch"),
    Reader(OPTIMIZERS, "lr weight_decay betas clip_grad optimizer override_optimizer_config", "utils/megatron/optimizer.py", "optim_config", CONTRACT_MEGATRON + "test_three_steps_of_adamw"),
    Reader(OPTIMIZERS, "lr_warmup_steps_ratio lr_warmup_steps lr_warmup_init lr_decay_steps lr_decay_style min_lr lr_wsd_decay_style lr_wsd_decay_steps", "utils/megatron/optimizer.py", "config", MEGATRON_ENGINE + "test_schedules"),
    Reader(OPTIMIZERS, "weight_decay_incr_style", "utils/megatron/optimizer.py", "config", MEGATRON_ENGINE + "test_weight_decay_follows_its_group_and_style"),
    Reader(OPTIMIZERS, "use_checkpoint_opt_param_scheduler", "utils/megatron/optimizer.py", "config", MEGATRON_ENGINE + "test_a_resumed_run_has_the_schedule_that_it_names"),
    Reader(ACTOR, "data_loader_seed", "workers/roles/batching.py", "config", "tests/workers/roles/test_megatron_roles.py::test_roles_give_what_one_fsdp_process_gives"),
    Reader("critic", "data_loader_seed", "workers/roles/batching.py", "config", "tests/workers/roles/test_megatron_roles.py::test_roles_give_what_one_fsdp_process_gives"),
    Reader(tuple(f"{node}.override_config.moe_config" for node in MODELS), "freeze_moe_router", "workers/engine/megatron/build.py", "options", MEGATRON_ENGINE + "test_routers_can_be_kept"),
    Reader(tuple(f"{node}.override_config" for node in MODELS), "model_config", "workers/config/overrides.py", "override_config", PARTS + "test_overrides_win_and_mappings_merge"),
]
# fmt: on
MEGATRON_ONE = {
    "trainer/config/ppo_megatron_trainer.yaml": tuple(
        f"{ROLLOUT}.layer_name_map.{name}" for name in ("qkv_layer_name", "gate_proj_layer_name")
    ),
    "trainer/config/engine/megatron.yaml": (f"{REF}.megatron.forward_only", "reward_model.megatron.forward_only"),
}
"""As ``ONE_IMPLEMENTATION``."""

MEGATRON_WHOLE = (
    *(f"{node}.override_transformer_config" for node in LAYOUTS),
    *(f"{node}.override_config.model_config" for node in MODELS),
)
"""Mappings whose keys are those of another library."""

MEGATRON_REFUSED = {
    **{f"{node}.strategy": "fsdp" for node in (*LAYOUTS, ACTOR, REF, "critic")},
    **{f"{node}.override_mcore_model_config": {"rotary_base": 1} for node in LAYOUTS},
    **{f"{MODEL}.{name}": value for name, value in (("lora_rank", 8), ("use_liger", True))},
    f"{MODEL}.enable_activation_offload": True,
}
"""As ``REFUSED``."""

# ---- the trees of the commands without a training loop

SFT, TURNS = "tests/trainer/test_sft_trainer.py::", "tests/utils/dataset/test_sft_datasets.py::"
GENERATED, SCORED = "tests/trainer/test_main_generation.py::", "tests/trainer/test_main_eval.py::"
# fmt: off
OFFLINE = {
    "generation": [
        Reader("trainer", "nnodes n_gpus_per_node device", "trainer/generation.py", "trainer", GENERATED + "test_greedy_responses_are_those_of_transformers"),
        Reader("data", "apply_chat_template_kwargs", "trainer/generation.py", "self.config.data", GENERATED + "test_the_chat_template_gets_its_arguments"),
        Reader("data", "path prompt_key output_path", "trainer/generation.py", "config.data", GENERATED + "test_what_is_refused_before_ray"),
        Reader("data.media", "image_formats max_mb", "utils/vision/limits.py", "self", GENERATED + "test_images_have_the_limits_of_the_configuration"),
        Reader("data.media", "max_s any_address", "utils/vision/fetching.py", "media", GENERATED + "test_images_have_the_limits_of_the_configuration"),
        Reader("data.media", "max_pixels", "utils/vision/images.py", "media", GENERATED + "test_images_have_the_limits_of_the_configuration"),
        Reader("data", "image_key video_key", "trainer/config/generation.py", "self.data", GENERATED + "test_images_that_cannot_be_shown_are_refused"),
        Reader("data", "batch_size n_samples", "trainer/generation.py", "self.config.data", GENERATED + "test_a_stopped_run_goes_on_and_gives_the_same"),
        Reader("model", "path", "trainer/main_generation.py", "parsed.model", GENERATED + "test_what_is_refused_before_ray"),
        Reader("model", "external_lib", "workers/config/model.py", "self", "tests/trainer/config/test_validation.py::test_names_of_the_users_own_need_a_module"),
        Reader("rollout", "name", "trainer/main_generation.py", "parsed.rollout", GENERATED + "test_what_is_refused_before_ray"),
        Reader("rollout", "temperature do_sample mode load_format tensor_model_parallel_size data_parallel_size", "trainer/config/generation.py", "rollout", GENERATED + "test_what_is_refused_before_ray"),
        Reader("rollout", "prompt_length", "trainer/generation.py", "self.rollout", GENERATED + "test_a_stopped_run_goes_on_and_gives_the_same"),
        Reader("rollout", "top_k top_p", "workers/rollout/base.py", LOOP, CONTRACT + "test_greedy_and_validation"),
        Reader("rollout", "response_length gpu_memory_utilization", "workers/rollout/engine_settings.py", "config", ARGS),
        Reader("rollout", "max_num_batched_tokens dtype max_num_seqs enable_chunked_prefill enforce_eager free_cache_engine disable_log_stats", "workers/rollout/vllm_rollout/engine_args.py", "config", ARGS),
        Reader("rollout", "max_model_len", "workers/config/rollout.py", "self", ARGS),
        Reader("rollout", "ignore_eos", "workers/rollout/base.py", "self.config", CONTRACT + "test_mask_follows_what_was_sampled"),
        Reader("ray_kwargs", "timeline_json_file", "trainer/run/launch.py", "cluster"),
        Reader("ray_kwargs.ray_init", "num_cpus", "trainer/run/launch.py", LOOP, "tests/trainer/run/test_launch.py::test_ray_is_local_unless_an_address_is_given"),
    ],
    "sft_trainer_engine": [
        Reader("data", "train_files val_files", "trainer/sft/trainer.py", "settings.data", SFT + "test_what_is_refused"),
        Reader("data", "pad_mode", "trainer/sft/trainer.py", "self.config.data", SFT + "test_padded_batch"),
        Reader("data", "train_batch_size", "trainer/sft/trainer.py", "data", SFT + "test_what_is_refused"),
        Reader("data", "use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu", "trainer/sft/trainer.py", "data", SFT + "test_loss_equals_transformers_and_the_export_holds_what_was_learnt"),
        Reader("data", "messages_key tools_key enable_thinking_key", "utils/dataset/sft_dataset.py", "columns", TURNS + "test_tools_and_thinking_reach_the_template"),
        Reader("data", "max_length use_shm apply_chat_template_kwargs", "utils/dataset/sft_dataset.py", "settings", TURNS + "test_no_padding_and_truncation"),
        Reader("data", "truncation", "utils/dataset/files.py", "settings", TURNS + "test_no_padding_and_truncation"),
        Reader("data.custom_cls", "path name", "trainer/sft/trainer.py", LOOP, SFT + "test_what_is_refused"),
        Reader("trainer", "default_local_dir default_hdfs_dir max_ckpt_to_keep resume_mode resume_from_path trusted_classes", "trainer/sft/trainer.py", "settings.trainer", SFT + "test_a_resumed_run_goes_on_as_if_it_had_not_stopped"),
        Reader("trainer", "logger", "trainer/run/output.py", "options", SFT + "test_loss_equals_transformers_and_the_export_holds_what_was_learnt"),
        Reader("trainer", "save_freq test_freq", "trainer/sft/trainer.py", "self.config.trainer", SFT + "test_loss_equals_transformers_and_the_export_holds_what_was_learnt"),
        Reader("trainer", "total_epochs total_training_steps", "trainer/sft/trainer.py", "trainer", SFT + "test_a_resumed_run_goes_on_as_if_it_had_not_stopped"),
        Reader("trainer", "save_on_sigterm_s", "trainer/sft/trainer.py", "options", E2E + "test_signals.py::test_supervised_training_saves_after_sigterm"),
        Reader("trainer", "record_digests", "trainer/sft/trainer.py", "options", SFT + "test_a_resumed_run_goes_on_as_if_it_had_not_stopped"),
        Reader("trainer", "project_name experiment_name report", "trainer/run/output.py", "options", SFT + "test_a_resumed_run_goes_on_as_if_it_had_not_stopped"),
        Reader("trainer", "seed", "trainer/sft/trainer.py", "settings.trainer", SFT + "test_what_is_refused"),
        Reader("trainer", "device", "trainer/sft/trainer.py", "config.trainer", SFT + "test_what_is_refused"),
    ],
    "sft_trainer": [
        Reader("data", "prompt_key response_key prompt_dict_keys response_dict_keys", "utils/dataset/files.py", "settings", TURNS + "test_single_turn_rows"),
        Reader("data", "micro_batch_size", "trainer/config/sft.py", "self", "tests/trainer/config/test_sft.py::test_refused"),
        Reader("data", "chat_template", "trainer/config/sft.py", "self", "tests/trainer/config/test_sft.py::test_refused"),
        Reader("data.multiturn", "enable", "trainer/sft/preflight.py", "data.get('multiturn') or {}", "tests/trainer/test_fsdp_sft_trainer.py::test_both_entries_give_the_same_metrics"),
        Reader("data.multiturn", "messages_key tools_key enable_thinking_key", "utils/dataset/sft_dataset.py", "columns", TURNS + "test_tools_and_thinking_reach_the_template"),
        Reader("model.fsdp_config", "cpu_offload offload_params", "trainer/config/sft.py", "sharding", "tests/trainer/config/test_sft.py::test_the_older_tree_is_moved"),
    ],
    "evaluation": [
        Reader("data", "path", "trainer/main_eval.py", "config.data", SCORED + "test_what_is_refused_before_ray"),
        Reader("data", "response_key data_source_key reward_model_key", "trainer/main_eval.py", "data", SCORED + "test_what_is_refused_before_ray"),
        Reader("scoring", "timeout_s failure_score", "trainer/main_eval.py", "scoring", SCORED + "test_a_response_that_takes_too_long_costs_its_own_score_alone"),
        Reader("custom_reward_function", "path name", "workers/rewards/loading.py", "node", SCORED + "test_a_scorer_of_ones_own_over_many_rows"),
        Reader("ray_kwargs", "timeline_json_file", "trainer/run/launch.py", "cluster"),
        Reader("ray_kwargs.ray_init", "num_cpus", "trainer/run/launch.py", LOOP, "tests/trainer/run/test_launch.py::test_ray_is_local_unless_an_address_is_given"),
    ],
}
# fmt: on
SAME_NODES = {
    "model": MODEL,
    "engine": f"{ACTOR}.fsdp_config",
    "optim": f"{ACTOR}.optim",
    "checkpoint": f"{ACTOR}.checkpoint",
}  # fmt: skip
"""Nodes of ``sft_trainer_engine`` that are those of ``ppo_trainer``: dataclass, readers and all."""
KEPT = ("kept for established commands", "no effect")
"""What the comment of a key says that these commands have for those of before, and that changes nothing."""
