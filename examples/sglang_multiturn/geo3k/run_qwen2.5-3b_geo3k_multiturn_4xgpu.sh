#!/usr/bin/env bash
# GRPO with images and a tool that scores answers: Qwen2.5-VL-3B-Instruct on Geometry3K, 4 GPUs, parameters and optimizer in CPU memory while others need the GPUs.
# Data first: python3 examples/data_preprocess/geo3k_multiturn_w_tool.py --local_save_dir ~/data/geo3k_multiturn_w_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2.5-3b_geo3k_multiturn.sh" \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    trainer.experiment_name=qwen2.5-vl-3b_4xgpu \
    trainer.n_gpus_per_node=4 \
    "$@"
