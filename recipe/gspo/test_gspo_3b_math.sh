#!/usr/bin/env bash
# GSPO (ratios of whole sequences): Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
ROLLOUT_MODE="${ROLLOUT_MODE:-sync}"
source "$(dirname "$0")/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GSM8K[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=512 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=0.0003 \
    actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.mode="$ROLLOUT_MODE" \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    reward_model.reward_manager=dapo \
    trainer.project_name=verl_gspo \
    trainer.experiment_name=gspo_3b_math \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=10 \
    "$@"
