#!/usr/bin/env bash
# GRPO with a search: Qwen2.5-3B-Instruct on the questions of Search-R1, one node of 8 GPUs; not run so far.
# Data first: python3 examples/data_preprocess/preprocess_search_r1_dataset.py, into ~/data/searchR1_processed_direct
# The retriever first, on port 8000: README.md. Arguments: the rollout engine (sglang unless given), then overrides.
set -euxo pipefail

ENGINE="${ENGINE:-sglang}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DATA_DIR="${DATA_DIR:-$HOME/data/searchR1_processed_direct}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
source "$(dirname "$0")/../../settings.sh"

python3 -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name=search_multiturn_grpo "${GRPO[@]}" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=512 \
    data.val_batch_size=256 \
    data.max_prompt_length=4096 \
    data.max_response_length=3000 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.max_model_len=15000 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2000 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/config/tool_config/search_tool_config.yaml" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    trainer.val_before_train=false \
    trainer.project_name=search_r1_like_async_rl \
    trainer.experiment_name=qwen2.5-3b-instruct-search-multiturn \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=100 \
    trainer.test_freq=50 \
    trainer.total_epochs=1 \
    "$@"
