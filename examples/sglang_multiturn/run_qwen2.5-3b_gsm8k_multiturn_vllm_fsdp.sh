#!/usr/bin/env bash
# GRPO with a tool that scores answers, on vLLM and FSDP: Qwen2.5-3B-Instruct on GSM8K, one node of 8 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euxo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
source "$HERE/../settings.sh"

python3 -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name=gsm8k_multiturn_grpo "${RUN[@]}" "${GRPO[@]}" \
    data.train_files="$DATA_DIR/gsm8k_tool/train.parquet" \
    data.val_files="$DATA_DIR/gsm8k_tool/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_torch_compile=false \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/config/tool_config/gsm8k_tool_config.yaml" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
    trainer.device=npu \
    trainer.project_name=gsm8k_multiturn \
    trainer.experiment_name=qwen2.5-3b_vllm_fsdp \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    "$@"
