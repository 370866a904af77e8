#!/usr/bin/env bash
# GRPO with a user who says whether an answer is right: Qwen2.5-0.5B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k_interaction
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euxo pipefail

ENGINE="${ENGINE:-sglang}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}"
source "$HERE/../settings.sh"

python3 -m verl.trainer.main_ppo --config-path="$HERE/config" --config-name=gsm8k_multiturn_grpo_w_interaction "${RUN[@]}" "${GRPO[@]}" \
    data.train_files="$DATA_DIR/gsm8k_interaction/train.parquet" \
    data.val_files="$DATA_DIR/gsm8k_interaction/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$HERE/config/interaction_config/gsm8k_interaction_config.yaml" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    trainer.project_name=gsm8k_multiturn \
    trainer.experiment_name=qwen2.5-0.5b_interaction \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    "$@"
