#!/usr/bin/env bash
# GRPO with images and Megatron-Core: Qwen3-VL-235B-A22B-Instruct on Geometry3K, TP 4 x PP 8 x EP 8, 8 nodes of 8 GPUs.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-VL-235B-A22B-Instruct}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${RUN[@]}" "${GEO3K[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.megatron.param_offload=true \
    trainer.project_name=verl_grpo_geo3k \
    trainer.experiment_name=qwen3_vl-235b_megatron \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=8 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
