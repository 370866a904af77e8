#!/usr/bin/env bash
# Fully asynchronous training on CPU: model and data are those of scripts/quickstart.sh, which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/fully_async_tiny_cpu}"
WORKERS="${WORKERS:-1}"
SERVERS="${SERVERS:-1}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").fully_async_main" "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    "data.train_files='$DATA_DIR/train.parquet'" \
    "data.val_files='$DATA_DIR/test.parquet'" \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    "actor_rollout_ref.model.path='$MODEL_PATH'" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    async_training.staleness_threshold=1.0 \
    async_training.trigger_parameter_sync_step=1 \
    async_training.max_off_policy_threshold=1 \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node="$SERVERS" \
    rollout.n=16 \
    rollout.total_rollout_steps=640 \
    rollout.test_freq=5 \
    trainer.project_name=quickstart \
    trainer.experiment_name=fully_async \
    "trainer.default_local_dir='$OUT_DIR'" \
    "$@"
