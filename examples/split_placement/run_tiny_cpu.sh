#!/usr/bin/env bash
# PPO on CPU, actor and critic in workers of their own; scripts/quickstart.sh prepares model and data (or give others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/split_tiny_cpu}"
WORKERS="${WORKERS:-2}"
source "$(dirname "$0")/../settings.sh"

python3 -m examples.split_placement.main_ppo_split "${CPU[@]}" \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.model.enable_gradient_checkpointing=false \
    critic.optim.lr=5e-4 \
    critic.ppo_epochs=2 \
    critic.use_dynamic_bsz=true \
    critic.ppo_max_token_len_per_gpu=4096 \
    trainer.n_gpus_per_node="$WORKERS" \
    trainer.project_name=quickstart \
    trainer.experiment_name=split \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    actor_rollout_ref.model.use_prefix_sharing=false \
    "$@"
