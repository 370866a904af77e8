#!/usr/bin/env bash
# GRPO: Qwen2-7B-Instruct on GSM8K with dynamic micro-batches, one node of 8 GPUs.
# ROLLOUT_MODE=sync generates a batch at a time instead of by agent loops.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2-7B-Instruct}"
ROLLOUT_NAME="${ROLLOUT_NAME:-vllm}"
ROLLOUT_MODE="${ROLLOUT_MODE:-async}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${GSM8K[@]}" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.mode="$ROLLOUT_MODE" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=qwen2-7b_seq_balance \
    trainer.n_gpus_per_node=8 \
    "$@"
