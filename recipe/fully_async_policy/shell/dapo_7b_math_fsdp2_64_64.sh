#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; 8 GPUs of each of 8 nodes generate and 8 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export NNODES="${NNODES:-8}" GENERATE=8 TRAIN=8 SEQUENCE_PARALLEL=4 NAME=64_64
bash "$(dirname "$0")/dapo_7b_math_fsdp2.sh" "$@"
