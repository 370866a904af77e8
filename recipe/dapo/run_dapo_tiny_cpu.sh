#!/usr/bin/env bash
# DAPO on CPU: model and data are those of scripts/quickstart.sh, which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/dapo_tiny_cpu}"
WORKERS="${WORKERS:-1}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_dapo" "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=20 \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=16 \
    data.gen_batch_size=24 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.n=16 \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=8 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.project_name=quickstart \
    trainer.experiment_name=dapo \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.test_freq=5 \
    "$@"
