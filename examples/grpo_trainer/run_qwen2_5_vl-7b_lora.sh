#!/usr/bin/env bash
# GRPO with images: LoRA adapters on the language model of Qwen2.5-VL-7B-Instruct, Geometry3K, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${GEO3K[@]}" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.exclude_modules='.*visual.*' \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=false \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 \
    trainer.project_name=verl_grpo_geo3k \
    trainer.experiment_name=qwen2_5_vl-7b_lora \
    trainer.n_gpus_per_node=8 \
    "$@"
