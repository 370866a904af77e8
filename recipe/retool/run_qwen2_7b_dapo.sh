#!/usr/bin/env bash
# The settings of DAPO with a code interpreter: the 7B model of run_qwen2_7b_sft.sh on DAPO-Math-17k, one node of 8 GPUs with 80 GB.
# Data first: hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir ~/data/DAPO-Math-17k, and yentinglin/aime_2025 to ~/data/aime_2025
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-checkpoints/retool/qwen2.5-7b-sft/global_step_372/huggingface}"
export NNODES="${NNODES:-1}"
tokens=$((2048 + 16384))
bash "$(dirname "$0")/run_qwen2-32b_dapo.sh" \
    data.train_batch_size=64 \
    data.max_response_length=16384 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$tokens" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((4 * tokens))" \
    trainer.experiment_name=qwen2.5-7b_dapo \
    "$@"
