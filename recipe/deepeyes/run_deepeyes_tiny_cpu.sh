#!/usr/bin/env bash
# Zoom in to see, on CPU: supervised rows show a tiny model what a zoom looks like, GRPO with tool_agent teaches when and where to look.
# The judge compares letters (exact_judge.py); LLM_AS_A_JUDGE_BASE names another one. Arguments: overrides of GRPO.
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/deepeyes}"
STEPS="${STEPS:-20}"
SFT_STEPS="${SFT_STEPS:-400}"
JUDGE_PORT="${JUDGE_PORT:-18901}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").textures" --save-dir "$OUT_DIR"

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    "data.train_files='$OUT_DIR/data/sft_train.parquet'" \
    "data.val_files='$OUT_DIR/data/sft_test.parquet'" \
    data.train_batch_size=32 \
    data.max_token_len_per_gpu=4096 \
    data.max_length=128 \
    "model.path='$OUT_DIR/model'" \
    optim.lr=2e-3 \
    trainer.project_name=deepeyes \
    "trainer.default_local_dir='$OUT_DIR/sft'" \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.test_freq=100

if [ -z "${LLM_AS_A_JUDGE_BASE:-}" ]; then
    export LLM_AS_A_JUDGE_BASE="http://127.0.0.1:$JUDGE_PORT/v1"
    python3 -m "recipe.$(basename "$HERE").exact_judge" --port "$JUDGE_PORT" &
    trap "kill $! || true" EXIT
fi

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    --config-path="$(realpath "$HERE")/configs" \
    --config-name=deepeyes_multiturn_grpo \
    algorithm.adv_estimator=grpo \
    "data.train_files='$OUT_DIR/data/train.parquet'" \
    "data.val_files='$OUT_DIR/data/test.parquet'" \
    data.train_batch_size=16 \
    data.max_prompt_length=32 \
    data.max_response_length=128 \
    data.custom_cls.path="$HERE/textures.py" \
    data.custom_cls.name=TextureDataset \
    "actor_rollout_ref.model.path='$(echo "$OUT_DIR"/sft/global_step_*/huggingface)'" \
    actor_rollout_ref.model.custom_chat_template=null \
    actor_rollout_ref.actor.optim.lr=5e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.n=8 \
    +actor_rollout_ref.rollout.limit_images=3 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable \
    trainer.project_name=deepeyes \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir='$OUT_DIR/grpo'" \
    "trainer.validation_data_dir='$OUT_DIR/grpo/validation'" \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=10 \
    trainer.save_freq=-1 \
    "$@"
