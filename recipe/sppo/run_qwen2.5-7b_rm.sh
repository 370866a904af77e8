#!/usr/bin/env bash
# SPPO: Qwen2.5-7B-Instruct on mathematics, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"

python3 -m "recipe.$(basename "$HERE").main_sppo" \
    data.train_files="$DATA_DIR/math/train.parquet" \
    data.val_files="$DATA_DIR/math/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    data.return_raw_chat=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    trainer.project_name=sppo-sglang \
    trainer.experiment_name=qwen2.5-7b \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=1 \
    trainer.total_epochs=1000 \
    "$@"
