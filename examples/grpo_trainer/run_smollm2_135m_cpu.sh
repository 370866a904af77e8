#!/usr/bin/env bash
# GRPO of a real pretrained model on CPU: SmolLM2-135M-Instruct learns to add two numbers below 50, asked in plain words.
# It writes model and data first; examples/smollm2_135m/README.md says what to install, and shows the run.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/smollm2_135m}"
MODEL_PATH="${MODEL_PATH:-$OUT_DIR/model}"
WORKERS="${WORKERS:-1}"

[ -f "$MODEL_PATH/config.json" ] || python3 examples/smollm2_135m/make_model.py --save-dir "$MODEL_PATH"
python3 examples/smollm2_135m/make_data.py --save-dir "$OUT_DIR/data"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT_DIR/data/train.parquet" \
    data.val_files="$OUT_DIR/data/test.parquet" \
    data.train_batch_size=8 \
    data.max_prompt_length=64 \
    data.max_response_length=24 \
    custom_reward_function.path=examples/smollm2_135m/reward.py \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=5e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    trainer.project_name=smollm2_135m \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT_DIR/grpo" \
    trainer.total_training_steps=50 \
    trainer.test_freq=10 \
    trainer.save_freq=25 \
    trainer.max_actor_ckpt_to_keep=1 \
    trainer.log_val_generations=8 \
    "$@"
