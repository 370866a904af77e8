#!/usr/bin/env bash
# A tiny model with a search, on CPU: supervised rows teach what a search looks like, GRPO with tool_agent when to make it.
# It serves the corpus itself, on SEARCH_PORT. Validates three times: before GRPO, after it, and after it without the tool. Arguments: overrides of GRPO.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/search}"
STEPS="${STEPS:-15}"
SFT_STEPS="${SFT_STEPS:-600}"
TASK=examples/sglang_multiturn/search_r1_like/lockers
export SEARCH_PORT="${SEARCH_PORT:-8017}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
source "$(dirname "$0")/../../settings.sh"

python3 "$TASK/make_task.py" --save-dir "$OUT_DIR"

python3 -m verl.tools.retrieval_server --corpus "$OUT_DIR/corpus.jsonl" --index bm25 --port "$SEARCH_PORT" &
SERVER=$!
trap 'kill "$SERVER" || true' EXIT

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    "data.train_files='$OUT_DIR/data/sft_train.parquet'" \
    "data.val_files='$OUT_DIR/data/sft_test.parquet'" \
    data.train_batch_size=64 \
    data.max_length=96 \
    "model.path='$OUT_DIR/model'" \
    optim.lr=3e-3 \
    trainer.project_name=search \
    "trainer.default_local_dir='$OUT_DIR/sft'" \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.test_freq=100

python3 -c "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:$SEARCH_PORT/health', timeout=10).read())"

COMMON=(
    "${CPU[@]}"
    algorithm.adv_estimator=grpo
    "data.train_files='$OUT_DIR/data/train.parquet'"
    "data.val_files='$OUT_DIR/data/test.parquet'"
    data.train_batch_size=16
    data.max_prompt_length=16
    data.max_response_length=128
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable
    custom_reward_function.path="$TASK/reward.py"
    trainer.project_name=search
)

python3 -m verl.trainer.main_ppo "${COMMON[@]}" \
    "actor_rollout_ref.model.path='$(echo "$OUT_DIR"/sft/global_step_*/huggingface)'" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$TASK/tools.yaml" \
    actor_rollout_ref.actor.checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir='$OUT_DIR/grpo'" \
    "trainer.validation_data_dir='$OUT_DIR/grpo/validation'" \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=5 \
    trainer.save_freq="$STEPS" \
    "$@"

python3 -m verl.trainer.main_ppo "${COMMON[@]}" \
    "actor_rollout_ref.model.path='$OUT_DIR/grpo/global_step_$STEPS/actor/huggingface'" \
    trainer.experiment_name=without_tool \
    "trainer.default_local_dir='$OUT_DIR/without_tool'" \
    trainer.val_only=true
