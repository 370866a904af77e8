#!/usr/bin/env bash
# GSPO on CPU. Model and data are those of scripts/quickstart.sh,
# which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euo pipefail

export OUT_DIR="${OUT_DIR:-outputs/gspo_tiny_cpu}"
bash "$(dirname "$0")/../../examples/grpo_trainer/run_tiny_cpu.sh" \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=0.03 \
    actor_rollout_ref.actor.clip_ratio_high=0.04 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    trainer.experiment_name=gspo \
    trainer.default_local_dir="$OUT_DIR" \
    "$@"
