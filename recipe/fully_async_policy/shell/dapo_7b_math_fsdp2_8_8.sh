#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; 8 GPUs generate and 8 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export NNODES="${NNODES:-1}" GENERATE=8 TRAIN=8 SEQUENCE_PARALLEL=1 NAME=8_8
bash "$(dirname "$0")/dapo_7b_math_fsdp2.sh" "$@"
