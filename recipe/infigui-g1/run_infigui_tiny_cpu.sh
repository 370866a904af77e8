#!/usr/bin/env bash
# The whole recipe on CPU: drawn screens of two buttons, a tiny Qwen2.5-VL with random weights, a warm-up, RLOO.
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/infigui_tiny_cpu}"
WORKERS="${WORKERS:-1}"
SFT_STEPS="${SFT_STEPS:-150}"
source "$HERE/../../examples/settings.sh"

if [ ! -f "$OUT_DIR/sft/latest_checkpointed_iteration.txt" ]; then
    python3 "$HERE/create_dataset.py" --local_save_dir "$OUT_DIR/data"
    python3 examples/tiny_model.py --kind qwen2_5_vl --hidden-size 64 --save-dir "$OUT_DIR/base"
    python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
        data.train_files="$OUT_DIR/data/sft_train.parquet" \
        data.train_batch_size=32 \
        data.max_token_len_per_gpu=4096 \
        data.max_length=112 \
        model.path="$OUT_DIR/base" \
        optim.lr=2e-3 \
        optim.lr_scheduler_type=constant \
        optim.lr_warmup_steps_ratio=0.05 \
        trainer.project_name=infigui-g1 \
        trainer.default_local_dir="$OUT_DIR/sft" \
        trainer.total_training_steps="$SFT_STEPS"
fi

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=rloo \
    data.train_files="$OUT_DIR/data/train.parquet" \
    data.val_files="$OUT_DIR/data/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=24 \
    data.max_response_length=72 \
    actor_rollout_ref.model.path="$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface" \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.n=8 \
    custom_reward_function.path="$HERE/reward_fn.py" \
    custom_reward_function.name=aer_gui_reward_function \
    trainer.project_name=infigui-g1 \
    trainer.experiment_name=rloo \
    trainer.default_local_dir="$OUT_DIR/rloo" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    "$@"
