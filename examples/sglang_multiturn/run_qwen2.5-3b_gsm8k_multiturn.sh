#!/usr/bin/env bash
# GRPO with a tool that scores answers: Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs; steps 1 and 2 leave snapshots of GPU memory.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euxo pipefail

ENGINE="${ENGINE:-sglang}"
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
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/config/tool_config/gsm8k_tool_config.yaml" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    global_profiler.tool=torch_memory \
    global_profiler.steps='[1,2]' \
    global_profiler.save_path=outputs/gsm8k_multiturn_memory \
    actor_rollout_ref.actor.profiler.enable=true \
    actor_rollout_ref.actor.profiler.all_ranks=true \
    trainer.project_name=gsm8k_multiturn \
    trainer.experiment_name=qwen2.5-3b \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    "$@"
