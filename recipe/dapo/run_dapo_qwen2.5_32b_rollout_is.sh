#!/usr/bin/env bash
# DAPO in full, with a loss that corrects for the gap between rollout engine and trainer: Qwen2.5-32B, 16 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export CKPTS_DIR="${CKPTS_DIR:-${RAY_DATA_HOME:-$HOME/verl}/ckpts/DAPO/DAPO-Qwen2.5-32B-Rollout-IS}"

# Importance weights. Watch first: ROLLOUT_IS=false reports the metrics and leaves the loss alone.
ROLLOUT_IS="${ROLLOUT_IS:-true}"
LEVEL="${LEVEL:-token}"
MODE="${MODE:-truncate}"
THRESHOLD="${THRESHOLD:-2.0}"
THRESHOLD_LOWER="${THRESHOLD_LOWER:-null}"
VETO="${VETO:-1e-4}"

# The run without them, and what differs.
bash "$(dirname "$0")/run_dapo_qwen2.5_32b.sh" \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    algorithm.rollout_is="$ROLLOUT_IS" \
    algorithm.rollout_is_level="$LEVEL" \
    algorithm.rollout_is_mode="$MODE" \
    algorithm.rollout_is_threshold="$THRESHOLD" \
    algorithm.rollout_is_threshold_lower="$THRESHOLD_LOWER" \
    algorithm.rollout_is_veto_threshold="$VETO" \
    trainer.experiment_name=DAPO-Qwen2.5-32B-Rollout-IS \
    "$@"
