#!/usr/bin/env bash
# GRPO with images: LoRA adapters on the language model of Qwen2.5-VL-7B-Instruct, Geometry3K, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.exclude_modules='.*visual.*' \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=true \
    trainer.experiment_name=qwen2_5_vl-7b_lora \
    "$@"
