#!/usr/bin/env bash
# GRPO on the verdicts of a generative reward model behind a server: Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: examples/data_preprocess/gsm8k.py, into ~/data/gsm8k. The server first: README.md
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
JUDGE_URL="${JUDGE_URL:-http://localhost:30000}"
JUDGE_MODEL="${JUDGE_MODEL:-genrm-demo}"
source "$HERE/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    reward_model.reward_manager=batch \
    reward_model.launch_reward_fn_async=true \
    custom_reward_function.path="$HERE/reward_function.py" \
    custom_reward_function.name=compute_score_batch \
    +custom_reward_function.reward_kwargs.base_url="$JUDGE_URL" \
    +custom_reward_function.reward_kwargs.model="$JUDGE_MODEL" \
    trainer.project_name=verl_genrm_remote \
    trainer.experiment_name=qwen2.5-3b \
    trainer.n_gpus_per_node=8 \
    "$@"
