#!/usr/bin/env bash
# RLOO with the adaptive exploration reward: Qwen2.5-VL-7B-Instruct on screens and instructions, two nodes of 8 GPUs with 80 GB.
# Data first: the parquet files of InfiX-ai/omniact_grounding_filtered, in ~/data/omniact_grounding_filtered
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-$HOME/data/omniact_grounding_filtered}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}"
NNODES="${NNODES:-2}"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/val.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=7168 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.clip_ratio_high=0.4 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=false \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    custom_reward_function.path="$HERE/reward_fn.py" \
    custom_reward_function.name=aer_gui_reward_function \
    trainer.project_name=infigui-g1 \
    trainer.experiment_name=7b \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.val_before_train=false \
    trainer.save_freq=16 \
    trainer.test_freq=16 \
    trainer.total_epochs=6 \
    "$@"
