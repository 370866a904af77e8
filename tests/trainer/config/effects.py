"""Where each key of ``ppo_trainer`` takes effect; ``test_every_key_has_an_effect`` holds it against the code."""

READERS: dict[str, dict[str, str]] = {
    "verl/algos/config.py": {
        "algorithm.kl_ctrl": "type horizon target_kl",
    },
    "verl/algos/kl.py": {
        "algorithm.kl_ctrl": "kl_coef",
    },
    "verl/algos/policy_loss.py": {
        "actor_rollout_ref.actor": "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c",
    },
    "verl/trainer/config/rollout/rollout.yaml": {
        "data": "max_response_length",
    },
    "verl/trainer/main_ppo.py": {
        "ray_kwargs": "timeline_json_file",
    },
    "verl/trainer/ppo/advantages.py": {
        "algorithm": "gamma lam norm_adv_by_std_in_grpo use_pf_ppo",
        "algorithm.pf_ppo": "reweight_method weight_pow",
    },
    "verl/trainer/ppo/build.py": {
        "data": "trust_remote_code",
    },
    "verl/trainer/ppo/checkpoint.py": {
        "trainer": (
            "seed resume_mode resume_from_path default_hdfs_dir del_local_ckpt_after_load default_local_dir "
            "max_actor_ckpt_to_keep max_critic_ckpt_to_keep"
        ),
    },
    "verl/trainer/ppo/inputs.py": {
        "data": "train_batch_size",
        "trainer": "logger",
    },
    "verl/trainer/ppo/launch.py": {
        "ray_kwargs.ray_init": "num_cpus",
    },
    "verl/trainer/ppo/loaders.py": {
        "data": "val_batch_size validation_shuffle",
    },
    "verl/trainer/ppo/phases.py": {
        "algorithm": "use_kl_in_reward",
    },
    "verl/trainer/ppo/ray_trainer.py": {
        "actor_rollout_ref.rollout": "skip_rollout",
        "actor_rollout_ref": "hybrid_engine",
        "reward_model": "launch_reward_fn_async",
        "algorithm": "adv_estimator kl_penalty",
        "trainer": (
            "balance_batch total_epochs total_training_steps rollout_data_dir save_freq esi_redundant_time "
            "val_before_train val_only test_freq critic_warmup worker_call_timeout_s"
        ),
    },
    "verl/trainer/ppo/resources.py": {
        "trainer": "nnodes n_gpus_per_node ray_wait_register_center_timeout",
    },
    "verl/trainer/ppo/run.py": {
        "trainer": "project_name experiment_name",
    },
    "verl/trainer/ppo/utils.py": {
        "critic": "enable",
    },
    "verl/trainer/ppo/validation.py": {
        "trainer": "log_val_generations validation_data_dir",
    },
    "verl/utils/checkpoint/checkpoint_manager.py": {
        "actor_rollout_ref.actor.checkpoint": "save_contents load_contents",
        "critic.checkpoint": "save_contents load_contents",
    },
    "verl/utils/dataset/factory.py": {
        "data": "shuffle seed dataloader_num_workers",
        "data.sampler": "class_path class_name",
    },
    "verl/utils/dataset/files.py": {
        "data": "train_files val_files",
    },
    "verl/utils/dataset/rl_dataset.py": {
        "data": (
            "use_shm prompt_key reward_fn_key max_prompt_length return_raw_chat return_full_prompt "
            "filter_overlong_prompts filter_overlong_prompts_workers truncation image_key video_key "
            "return_multi_modal_inputs apply_chat_template_kwargs"
        ),
        "data.custom_cls": "path name",
        "data.datagen": "path name",
    },
    "verl/utils/fsdp_utils.py": {
        "actor_rollout_ref.actor.fsdp_config.wrap_policy": "min_num_params",
        "actor_rollout_ref.ref.fsdp_config.wrap_policy": "min_num_params",
        "critic.model.fsdp_config.wrap_policy": "min_num_params",
    },
    "verl/utils/rollout_skip.py": {
        "actor_rollout_ref.rollout": "skip_dump_dir",
    },
    "verl/workers/config/actor.py": {
        "actor_rollout_ref.actor": "grad_clip",
    },
    "verl/workers/config/checkpoint.py": {
        "actor_rollout_ref.actor.checkpoint": "async_save",
        "critic.checkpoint": "async_save",
    },
    "verl/workers/config/critic.py": {
        "critic": "grad_clip",
    },
    "verl/workers/config/model.py": {
        "actor_rollout_ref.model": (
            "hf_config_path tokenizer_path use_shm custom_chat_template external_lib trust_remote_code"
        ),
        "critic.model": "tokenizer_path external_lib use_shm",
    },
    "verl/workers/config/optimizer.py": {
        "actor_rollout_ref.actor.optim": "warmup_style",
        "critic.optim": "warmup_style",
    },
    "verl/workers/config/rollout.py": {
        "actor_rollout_ref.rollout": "pipeline_model_parallel_size",
    },
    "verl/workers/engine/fsdp/adapters.py": {
        "actor_rollout_ref.model": "path lora_rank lora_alpha target_modules exclude_modules",
        "critic.model": "path lora_rank lora_alpha target_modules",
    },
    "verl/workers/engine/fsdp/build.py": {
        "actor_rollout_ref.actor.fsdp_config": (
            "offload_policy reshard_after_forward model_dtype ulysses_sequence_parallel_size seed"
        ),
        "actor_rollout_ref.actor": "use_remove_padding",
        "actor_rollout_ref.ref.fsdp_config": (
            "offload_policy reshard_after_forward model_dtype ulysses_sequence_parallel_size seed"
        ),
        "actor_rollout_ref.model": ("override_config enable_gradient_checkpointing use_remove_padding use_liger"),
        "critic.model.fsdp_config": (
            "offload_policy reshard_after_forward model_dtype ulysses_sequence_parallel_size seed"
        ),
        "critic.model": "override_config trust_remote_code enable_gradient_checkpointing use_remove_padding",
    },
    "verl/workers/engine/fsdp/engine.py": {
        "actor_rollout_ref.actor.optim": "clip_grad",
        "actor_rollout_ref.actor.fsdp_config": (
            "param_offload optimizer_offload entropy_from_logits_with_chunking forward_only"
        ),
        "actor_rollout_ref.ref.fsdp_config": (
            "param_offload optimizer_offload entropy_from_logits_with_chunking forward_only"
        ),
        "actor_rollout_ref.model": "enable_activation_offload",
        "critic.optim": "clip_grad",
        "critic.model.fsdp_config": ("param_offload optimizer_offload entropy_from_logits_with_chunking forward_only"),
        "critic.model": "enable_activation_offload",
    },
    "verl/workers/engine/fsdp/layout.py": {
        "actor_rollout_ref.actor.fsdp_config": "fsdp_size",
        "actor_rollout_ref.ref.fsdp_config": "fsdp_size",
        "critic.model.fsdp_config": "fsdp_size",
    },
    "verl/workers/engine/fsdp/optim.py": {
        "actor_rollout_ref.actor.optim": (
            "lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas min_lr_ratio "
            "num_cycles lr_scheduler_type"
        ),
        "critic.optim": (
            "lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas min_lr_ratio "
            "num_cycles lr_scheduler_type"
        ),
    },
    "verl/workers/reward_manager/__init__.py": {
        "reward_model": "reward_manager",
    },
    "verl/workers/reward_manager/abstract.py": {
        "reward_model": "reward_kwargs",
        "custom_reward_function": "reward_kwargs",
    },
    "verl/workers/reward_manager/batch.py": {
        "custom_reward_function": "path",
    },
    "verl/workers/reward_manager/loading.py": {
        "custom_reward_function": "name",
    },
    "verl/workers/roles/actor_rollout_ref.py": {
        "actor_rollout_ref.actor": (
            "ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
            "ppo_max_token_len_per_gpu entropy_coeff use_kl_loss kl_loss_coef ppo_epochs shuffle "
            "ulysses_sequence_parallel_size"
        ),
        "actor_rollout_ref.ref": (
            "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
            "log_prob_max_token_len_per_gpu model ulysses_sequence_parallel_size"
        ),
        "actor_rollout_ref.rollout": (
            "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
            "log_prob_max_token_len_per_gpu"
        ),
        "actor_rollout_ref": "nccl_timeout",
    },
    "verl/workers/roles/base.py": {
        "actor_rollout_ref.actor.fsdp_config": "use_torch_compile entropy_checkpointing strategy",
        "actor_rollout_ref.actor": ("use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing"),
        "actor_rollout_ref.ref": "use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing",
        "actor_rollout_ref.ref.fsdp_config": "use_torch_compile entropy_checkpointing strategy",
        "critic.model.fsdp_config": "use_torch_compile entropy_checkpointing strategy",
    },
    "verl/workers/roles/critic.py": {
        "critic": (
            "rollout_n ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
            "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu ppo_epochs shuffle "
            "forward_micro_batch_size forward_micro_batch_size_per_gpu ulysses_sequence_parallel_size"
        ),
    },
    "verl/workers/roles/utils/losses.py": {
        "actor_rollout_ref.actor": "loss_agg_mode kl_loss_type",
        "critic": "cliprange_value loss_agg_mode",
    },
    "verl/workers/rollout/batch.py": {
        "actor_rollout_ref.rollout": "top_p repetition_penalty do_sample",
        "actor_rollout_ref.rollout.val_kwargs": "top_p do_sample",
    },
    "verl/workers/rollout/vllm_rollout/engine_args.py": {
        "actor_rollout_ref.rollout": (
            "temperature prompt_length response_length dtype gpu_memory_utilization enforce_eager "
            "cudagraph_capture_sizes free_cache_engine tensor_model_parallel_size data_parallel_size "
            "expert_parallel_size max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill "
            "enable_prefix_caching load_format disable_log_stats seed skip_tokenizer_init"
        ),
        "actor_rollout_ref.rollout.engine_kwargs": "vllm",
        "actor_rollout_ref.rollout.val_kwargs": "temperature",
    },
    "verl/workers/rollout/vllm_rollout/vllm_rollout.py": {
        "actor_rollout_ref.rollout": "top_k ignore_eos n calculate_log_probs layered_summon",
        "actor_rollout_ref.rollout.val_kwargs": "top_k n",
    },
    "verl/workers/sharding_manager/__init__.py": {
        "actor_rollout_ref.rollout": "update_weights_bucket_megabytes",
    },
}
"""File -> node -> names of the keys that it reads."""

ONE_IMPLEMENTATION = {
    "trainer.use_legacy_worker_impl",
    "actor_rollout_ref.rollout.multi_stage_wake_up",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch",
    "actor_rollout_ref.actor.fsdp_config.use_orig_params",
    "actor_rollout_ref.ref.fsdp_config.forward_prefetch",
    "actor_rollout_ref.ref.fsdp_config.use_orig_params",
    "critic.model.fsdp_config.forward_prefetch",
    "critic.model.fsdp_config.use_orig_params",
}
"""Switches between implementations of which there is one here: every value means it."""

GATED = {
    "profiler.": "profiler.enable",
    "global_profiler.global_tool_config.": "global_profiler.tool",
    "reward_model.model.": "reward_model.enable",
    "reward_model.use_dynamic_bsz": "reward_model.enable",
    "reward_model.forward_max_token_len_per_gpu": "reward_model.enable",
    "reward_model.sandbox_fusion.": "reward_model.sandbox_fusion.url",
}
"""Options (parts of their dotted keys) of a feature whose own switch is refused."""

AWAITED: set[str] = set()
"""Keys whose reader is not written yet; empty when the work is done."""
