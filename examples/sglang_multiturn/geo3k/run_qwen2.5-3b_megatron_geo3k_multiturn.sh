#!/usr/bin/env bash
# GRPO with images, a tool that scores answers, and Megatron-Core: Qwen2.5-VL-3B-Instruct on Geometry3K, TP 2 x PP 2, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/geo3k_multiturn_w_tool.py --local_save_dir ~/data/geo3k_multiturn_w_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euxo pipefail

ENGINE="${ENGINE:-sglang}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}"

python3 -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name=geo3k_multiturn_megatron_grpo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/geo3k_multiturn_w_tool/train.parquet" \
    data.val_files="$DATA_DIR/geo3k_multiturn_w_tool/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/config/tool_config/geo3k_tool_config.yaml" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    trainer.project_name=geo3k_multiturn \
    trainer.experiment_name=qwen2.5-vl-3b_megatron \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    trainer.total_epochs=15 \
    "$@"
