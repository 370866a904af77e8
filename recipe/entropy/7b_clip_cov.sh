#!/usr/bin/env bash
# Clip-Cov: Qwen2.5-7B on DAPO-Math-17k, 4 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/entropy/clipcov-qwen2.5-7b}"
bash "$(dirname "$0")/7b_kl_cov.sh" \
    actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov \
    actor_rollout_ref.actor.clip_ratio_low=1 \
    actor_rollout_ref.actor.clip_ratio_high=1 \
    trainer.experiment_name=clipcov-qwen2.5-7b \
    actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.0002 \
    actor_rollout_ref.actor.policy_loss.ppo_kl_coef=0.1 \
    "$@"
