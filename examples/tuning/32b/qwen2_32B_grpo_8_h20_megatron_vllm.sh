#!/usr/bin/env bash
# GRPO with Megatron-Core: Qwen2.5-32B-Instruct on GSM8K and MATH, TP 8, eight H20 with 96 GB, offload and vLLM.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}"
source "$(dirname "$0")/../../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${RUN[@]}" "${GSM8K_MATH[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.megatron.param_offload=true \
    trainer.project_name=verl_tuning \
    trainer.experiment_name=qwen2_32B_grpo_8_h20_megatron_vllm \
    trainer.n_gpus_per_node=8 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
