#!/usr/bin/env bash
# The settings of DAPO with a code interpreter (recipe/retool): Qwen3-4B on DAPO-Math-17k, one node of 8 GPUs with 80 GB.
# Data first: hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir ~/data/DAPO-Math-17k, and Maxwell-Jia/AIME_2024 to ~/data/AIME_2024
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
export ENGINE="${ENGINE:-sglang}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-4B-Instruct-2507}"
export NNODES="${NNODES:-1}"
bash "$(dirname "$0")/../../recipe/retool/run_qwen2-32b_dapo.sh" \
    data.val_files="$DATA_DIR/AIME_2024" \
    data.train_batch_size=64 \
    data.max_response_length=16384 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.75 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=16 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16 \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=73728 \
    trainer.project_name=dapo_multiturn \
    trainer.experiment_name=qwen3_4b \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    "$@"
