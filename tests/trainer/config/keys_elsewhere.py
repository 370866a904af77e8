"""The keys that other versions of the established project have and this one has not, or has since."""

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
CORRECTION, CHECKPOINT_ENGINE = "algorithm.rollout_correction", f"{ROLLOUT}.checkpoint_engine"


def below(node: str, names: str) -> list[str]:
    return [f"{node}.{name}" for name in names.split()]


TORCH = "contents discrete skip_first wait warmup active repeat"
LORA = "adapter_path dropout dtype"
MUON = "muon_momentum muon_nesterov"
LOW_PRECISION = "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype"

KEYS: dict[str, list[str]] = {
    "alias": [
        "model_engine",
        *below("reward.custom_reward_function", "path name reward_kwargs"),
        *below("reward.reward_manager", "source name module.path module.name"),
        *below("reward.reward_model", "enable enable_resource_pool n_gpus_per_node nnodes model_path rollout.name"),
        *below("reward.sandbox_fusion", "url max_concurrent memory_limit_mb"),
        *below("sandbox_fusion", "url max_concurrent memory_limit_mb"),
        *below(CORRECTION, "rollout_is rollout_is_threshold"),
        *(key for node in ("skip.rollout", "skip.rollout_tq") for key in below(node, "enable dump_dir")),
        f"{CHECKPOINT_ENGINE}.update_weights_bucket_megabytes",
        *below(ROLLOUT, "full_determinism scheduling_policy prometheus.enable"),
        *(f"{node}.lora.{name}" for node in (MODEL, "model") for name in ("rank", "alpha")),
        *(f"{node}.lora.{name}" for node in (MODEL, "model") for name in ("target_modules", "exclude_modules")),
        *below("critic.model.lora", "rank alpha target_modules"),
        "critic.fsdp.param_offload",
        *below("data", "tool_config_path function_tool_path"),
        *below(ACTOR, "tau_pos tau_neg rollout_n"),
        *(f"{node}.megatron.vanilla_mbridge" for node in (ACTOR, REF, "critic")),
        *below("trainer.v1.separate_async", "num_warmup_batches parameter_sync_step"),
        *below("trainer.v1.colocate_async", "num_warmup_batches"),
        *below("trainer.v1.sampler", "max_off_policy_threshold max_off_policy_strategy"),
        "data.mm_processor_kwargs",
    ],
    "accepted": [
        *below("trainer", "use_v1 v1.trainer_mode"),
        "ray_kwargs.ray_init.runtime_env.py_executable",
        "transfer_queue.enable",
        *(f"{node}.lora.merge" for node in (MODEL, "critic.model", "model")),
        f"{CHECKPOINT_ENGINE}.backend",
        f"{ROLLOUT}.logprobs_mode",
        *below(ACTOR, "calculate_entropy pad_to_length checkpoint.strict"),
        "critic.checkpoint.strict",
        "algorithm.filter_groups.max_inflight_gen_batches",
        *(
            key
            for node in (ACTOR, REF, "critic")
            for key in below(f"{node}.megatron", "use_remove_padding dtype dist_checkpointing_prefix")
        ),
    ],
    "built": [
        "reward.num_workers",
        f"{CORRECTION}.bypass_mode",
        *(key for node in ("skip.rollout", "skip.rollout_tq") for key in below(node, "steps action")),
        *(f"{node}.full_determinism" for node in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "engine")),
        "critic.model.fsdp_config.full_determinism",
        *below(f"{ROLLOUT}.trace", "project_name experiment_name max_samples_per_step_per_worker"),
        *below("data", "train_max_samples val_max_samples image_patch_size ignore_input_ids_mismatch"),
        f"{ROLLOUT}.multi_turn.function_tool_path",
        f"{ACTOR}.entropy_from_logits_chunk_size",
        *below("global_profiler", "relocate_results finish_hook_cmd finish_hook_all_ranks finish_hook_ranks"),
        *(
            key
            for role in (ACTOR, REF, ROLLOUT, "critic", "reward_model")
            for key in below(f"{role}.profiler.tool_config.torch", TORCH)
        ),
    ],
    "feature": [
        *below(
            "trainer.v1.sampler", "sync_refill_failed_groups custom_sampler.path custom_sampler.name sampler_kwargs"
        ),
        *below(CORRECTION, "rollout_rs rollout_rs_threshold loss_type rollout_is_batch_normalize"),
        *below("distillation", "enabled teacher_models.one.model_path teacher_key n_gpus_per_node nnodes"),
        *below("distillation.distillation_loss", "loss_mode topk tail_mass_eps use_task_rewards loss_max_clamp"),
        *below("distillation.distillation_loss", "distillation_loss_coef log_prob_min_clamp use_policy_gradient"),
        *below("distillation.distillation_loss", "policy_loss_mode clip_ratio"),
        *(f"{role}.router_replay.mode" for role in (ACTOR, REF)),
        f"{ROLLOUT}.enable_rollout_routing_replay",
        *below("algorithm", "gdpo_reward_keys gdpo_reward_weights"),
        f"{ACTOR}.calculate_sum_pi_squared",
        *below(ROLLOUT, "quantization quantization_config_file"),
        *(key for node in (MODEL, "critic.model", "model") for key in below(f"{node}.lora", LORA)),
        *(f"{node}.lora_adapter_path" for node in (MODEL, "critic.model", "model")),
    ],
    "refused": [
        *below("trainer.v1.separate_async", "hybrid_rollout.enable_switch enable_switch"),
        "separate_async.enable_switch",
        *below(CHECKPOINT_ENGINE, "engine_kwargs custom_backend_module"),
        *(f"{node}.qat.enable" for node in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "engine")),
        "critic.model.fsdp_config.qat.enable",
        *below(ROLLOUT, "disaggregation.enable mtp.enable"),
        *below(MODEL, "mtp.enable tiled_mlp.enabled"),
        *below(f"{ROLLOUT}.prometheus", "port file served_model_name"),
        "data.audio_key",
        *(key for node in (f"{ACTOR}.optim", "critic.optim", "optim") for key in below(node, f"optimizer {MUON}")),
        *(key for node in (f"{ACTOR}.optim", "critic.optim", "optim") for key in below(node, LOW_PRECISION)),
    ],
}

VALUES: dict[str, dict[str, list[str]]] = {
    "feature": {
        f"{CHECKPOINT_ENGINE}.backend": ["delta", "delta_sharded"],
        f"{ACTOR}.policy_loss.loss_mode": ["dppo_tv", "dppo_kl", "dro", "bypass_mode"],
        "algorithm.adv_estimator": ["gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"],
        "reward_model.reward_manager": ["gdpo"],
    },
    "alias": {"trainer.v1.trainer_mode": ["separate_async", "colocate_async"]}
    | {f"{node}.optimizer": ["AdamW", "adamw"] for node in (f"{ACTOR}.optim", "critic.optim", "optim")},
}
"""Values that have a decision of their own."""
