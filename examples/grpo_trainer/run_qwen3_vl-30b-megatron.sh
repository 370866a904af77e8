#!/usr/bin/env bash
# GRPO with images and Megatron-Core: Qwen3-VL-30B-A3B-Instruct on Geometry3K, TP 2 x EP 8, 2 nodes of 8 GPUs.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-VL-30B-A3B-Instruct}"
bash "$(dirname "$0")/run_qwen2_5_vl-7b-megatron.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.ref.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    trainer.experiment_name=qwen3_vl-30b_megatron \
    trainer.nnodes=2 \
    "$@"
