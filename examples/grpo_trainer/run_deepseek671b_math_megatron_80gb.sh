#!/usr/bin/env bash
# GRPO with Megatron-Core: DeepSeek-V3-0324 (671B) on GSM8K and MATH, PP 16 x EP 32, 64 nodes of 8 GPUs with 80 GB.
# The hub holds the weights in FP8: MODEL_PATH must name a copy in bf16.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-deepseek-ai/DeepSeek-V3-0324-BF16}"
NNODES="${NNODES:-64}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${RUN[@]}" "${GSM8K_MATH[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.trust_remote_code=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=32 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.megatron.param_offload=true \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=deepseek671b_math_megatron_80gb \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
