#!/usr/bin/env bash
# DeepEyes by GRPO: Qwen2.5-VL-7B-Instruct on DeepEyes-Datasets-47k, rewards by a judge behind a server, one node of 8 GPUs with 80 GB.
# The judge first: README.md
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-$HOME/data/DeepEyes-Datasets-47k}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}"
NNODES="${NNODES:-1}"
export LLM_AS_A_JUDGE_BASE="${LLM_AS_A_JUDGE_BASE:-http://localhost:18901/v1}"
source "$HERE/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${OFFLOAD[@]}" \
    --config-path="$(realpath "$HERE")/configs" \
    --config-name=deepeyes_multiturn_grpo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$DATA_DIR/data_0.1.2_visual_toolbox_v2.parquet','$DATA_DIR/data_thinklite_reasoning_acc.parquet']" \
    data.val_files="$DATA_DIR/data_v0.8_visual_toolbox_v2.parquet" \
    data.train_batch_size=256 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 \
    actor_rollout_ref.rollout.n=8 \
    +actor_rollout_ref.rollout.limit_images=6 \
    actor_rollout_ref.rollout.max_num_batched_tokens=32768 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    trainer.val_before_train=false \
    trainer.project_name=deepeyes \
    trainer.experiment_name=qwen2.5-vl-7b \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=8 \
    trainer.test_freq=80 \
    trainer.total_epochs=1 \
    "$@"
