#!/usr/bin/env bash
# SPPO on CPU: model and data are those of scripts/quickstart.sh, which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/sppo_tiny_cpu}"
WORKERS="${WORKERS:-1}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_sppo" "${CPU[@]}" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    trainer.project_name=quickstart \
    trainer.experiment_name=sppo \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    "$@"
