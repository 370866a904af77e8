#!/usr/bin/env bash
# GRPO on exact counts, from the model of train_sft.sh (SmolLM2-135M-Instruct after three epochs), one GPU.
# Data first: python3 recipe/char_count/create_dataset.py
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-$HOME/data/char_count}"
MODEL_PATH="${MODEL_PATH:-models/sft/global_step_105/huggingface}"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/rl/train.parquet" \
    data.val_files="$DATA_DIR/rl/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=128 \
    data.max_response_length=128 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    custom_reward_function.path="$HERE/reward_function.py" \
    custom_reward_function.name=char_count_reward_function \
    trainer.logger='[console]' \
    trainer.project_name=verl_example \
    trainer.experiment_name=smol135m_grpo \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=100 \
    trainer.test_freq=100 \
    trainer.total_epochs=2 \
    "$@"
