#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; of each of 4 nodes 8 GPUs generate and 8 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

NNODES=4 GENERATE=8 TRAIN=8 SEQUENCE_PARALLEL=4 NAME=32_32 source "$(dirname "$0")/dapo_7b_math_fsdp2.sh"
