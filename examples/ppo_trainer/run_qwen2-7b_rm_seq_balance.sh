#!/usr/bin/env bash
# PPO with a critic on the scores of a reward model, with dynamic micro-batches: Qwen2-7B-Instruct on the
# prompts of GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2-7B-Instruct}"
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-sfairXC/FsfairX-LLaMA3-RM-v0.1}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GSM8K_MATH[@]}" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.return_raw_chat=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=98304 \
    reward_model.enable=true \
    reward_model.model.path="$REWARD_MODEL_PATH" \
    reward_model.model.use_remove_padding=true \
    reward_model.model.fsdp_config.param_offload=true \
    reward_model.use_dynamic_bsz=true \
    reward_model.forward_max_token_len_per_gpu=98304 \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=qwen2-7b_rm_seq_balance \
    trainer.n_gpus_per_node=8 \
    "$@"
