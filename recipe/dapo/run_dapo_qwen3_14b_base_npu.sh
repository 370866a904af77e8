#!/usr/bin/env bash
# DAPO in full: Qwen3-14B-Base on DAPO-Math-17k, one node of 16 Ascend devices with 64 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-14B-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen3-14B-Base-npu}"

bash "$(dirname "$0")/run_dapo_qwen3_8b_base_npu.sh" \
    trainer.experiment_name=DAPO-Qwen3-14B-Base-npu \
    "$@"
