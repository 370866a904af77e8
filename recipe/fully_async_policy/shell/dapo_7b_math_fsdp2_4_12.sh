#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; 2 GPUs of each of 2 nodes generate and 6 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export RESPONSES=12 NNODES="${NNODES:-2}" GENERATE=2 TRAIN=6 SEQUENCE_PARALLEL=1 NAME=4_12
bash "$(dirname "$0")/dapo_7b_math_fsdp2.sh" "$@"
