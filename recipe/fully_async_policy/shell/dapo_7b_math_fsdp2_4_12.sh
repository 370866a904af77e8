#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; of each of 2 nodes 2 GPUs generate and 6 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

NNODES=2 GENERATE=2 TRAIN=6 SEQUENCE_PARALLEL=1 NAME=4_12 source "$(dirname "$0")/dapo_7b_math_fsdp2.sh"
