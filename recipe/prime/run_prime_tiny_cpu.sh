#!/usr/bin/env bash
# PRIME on CPU: model and data are those of scripts/quickstart.sh, which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/prime_tiny_cpu}"
WORKERS="${WORKERS:-1}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_prime" "${CPU[@]}" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=16 \
    data.oversample_factor=2.0 \
    data.accuracy_lower_bound=0.1 \
    data.accuracy_upper_bound=0.9 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.n=8 \
    reward_model.use_dynamic_bsz=true \
    reward_model.forward_max_token_len_per_gpu=2048 \
    reward_model.model.optim.lr=1e-4 \
    reward_model.model.beta_train=0.5 \
    algorithm.reward_dpo_coef=1 \
    reward_model.reward_manager=naive \
    trainer.project_name=quickstart \
    trainer.experiment_name=prime \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.val_before_train=true \
    trainer.test_freq=5 \
    "$@"
