#!/usr/bin/env bash
# GRPO with images on CPU: drawn figures and the tiny Qwen2.5-VL that examples/sft/run_tiny_vl_cpu.sh, to be run first, has warmed up.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/tiny_vl_cpu}"
WORKERS="${WORKERS:-2}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT_DIR/data/train.parquet" \
    data.val_files="$OUT_DIR/data/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=32 \
    data.max_response_length=16 \
    actor_rollout_ref.model.path="$(echo "$OUT_DIR"/sft/global_step_*/huggingface)" \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.n=16 \
    trainer.n_gpus_per_node="$WORKERS" \
    trainer.default_local_dir="$OUT_DIR/grpo" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    trainer.save_freq=-1 \
    "$@"
