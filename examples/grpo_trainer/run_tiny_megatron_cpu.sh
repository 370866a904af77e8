#!/usr/bin/env bash
# GRPO with Megatron-Core on two CPU workers, which share each layer (TP=2), or each hold half of them (TP=1 PP=2).
# scripts/quickstart.sh prepares model and data (or give others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/grpo_tiny_megatron_cpu}"
WORKERS="${WORKERS:-2}"
TP="${TP:-2}"
PP="${PP:-1}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP" \
    actor_rollout_ref.rollout.n=16 \
    trainer.n_gpus_per_node="$WORKERS" \
    trainer.project_name=quickstart \
    trainer.experiment_name=grpo_megatron \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.test_freq=5 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
