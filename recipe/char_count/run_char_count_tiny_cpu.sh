#!/usr/bin/env bash
# The whole recipe on CPU: data, a tiny Qwen2 with random weights, a short supervised warm-up, GRPO.
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/char_count}"
WORKERS="${WORKERS:-1}"
SFT_STEPS="${SFT_STEPS:-200}"

if [ ! -f "$OUT_DIR/sft/latest_checkpointed_iteration.txt" ]; then
    python3 "$HERE/create_dataset.py" --data_path "$OUT_DIR/data" --min_length 3 --max_length 8 --seed 1
    python3 examples/tiny_model.py --save-dir "$OUT_DIR/base" --seed 1
    python3 -m verl.trainer.fsdp_sft_trainer \
        data.train_files="$OUT_DIR/data/sft/train.parquet" \
        data.val_files="$OUT_DIR/data/sft/test.parquet" \
        data.prompt_key=prompt \
        data.response_key=response \
        data.train_batch_size=64 \
        data.micro_batch_size_per_gpu=64 \
        data.max_length=96 \
        model.partial_pretrain="$OUT_DIR/base" \
        model.enable_gradient_checkpointing=false \
        use_remove_padding=true \
        optim.lr=2e-3 \
        trainer.device=cpu \
        trainer.logger='[]' \
        trainer.project_name=char_count \
        trainer.experiment_name=sft \
        trainer.default_local_dir="$OUT_DIR/sft" \
        trainer.checkpoint.save_contents='[hf_model]' \
        trainer.total_epochs=100 \
        trainer.total_training_steps="$SFT_STEPS" \
        trainer.test_freq=100 \
        trainer.save_freq=1000
fi
source "$HERE/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT_DIR/data/rl/train.parquet" \
    data.val_files="$OUT_DIR/data/rl/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=48 \
    data.max_response_length=48 \
    actor_rollout_ref.model.path="$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.n=8 \
    custom_reward_function.path="$HERE/reward_function.py" \
    custom_reward_function.name=char_count_reward_function \
    trainer.project_name=char_count \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT_DIR/grpo" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    "$@"
