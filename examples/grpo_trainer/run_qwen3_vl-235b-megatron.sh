#!/usr/bin/env bash
# GRPO with images and Megatron-Core: Qwen3-VL-235B-A22B-Instruct on Geometry3K, TP 4 x PP 8 x EP 8, 8 nodes of 8 GPUs.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-VL-235B-A22B-Instruct}"
bash "$(dirname "$0")/run_qwen3_vl-30b-megatron.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=16 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    trainer.experiment_name=qwen3_vl-235b_megatron \
    trainer.nnodes=8 \
    "$@"
