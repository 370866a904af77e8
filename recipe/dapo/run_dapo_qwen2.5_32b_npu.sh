#!/usr/bin/env bash
# DAPO in full: Qwen2.5-32B on DAPO-Math-17k, two nodes of 16 Ascend devices with 64 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-32B}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-32B-npu}"
export NNODES="${NNODES:-2}"

bash "$(dirname "$0")/run_dapo_qwen2.5_7b_npu.sh" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    trainer.experiment_name=DAPO-Qwen2.5-32B-npu \
    "$@"
