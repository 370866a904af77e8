#!/usr/bin/env bash
# The whole recipe on CPU without a network: a tiny model learns when it has to ask its user, who is played by a small server.
# The server, on PORT, is also the judge. Arguments: overrides of GRPO.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/collabllm}"
STEPS="${STEPS:-10}"
SFT_STEPS="${SFT_STEPS:-200}"
PORT="${PORT:-8018}"
HERE="$(dirname "$0")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" USER_BASE_URL="http://127.0.0.1:$PORT"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").tiny.make_task" --save-dir "$OUT_DIR"

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    "data.train_files='$OUT_DIR/data/sft.parquet'" \
    data.train_batch_size=64 \
    data.max_length=48 \
    "model.path='$OUT_DIR/model'" \
    optim.lr=3e-3 \
    trainer.project_name=collabllm \
    "trainer.default_local_dir='$OUT_DIR/sft'" \
    trainer.total_training_steps="$SFT_STEPS"

python3 -m "recipe.$(basename "$HERE").tiny.people" --port "$PORT" &
PEOPLE=$!
trap 'kill "$PEOPLE" || true' EXIT

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    "data.train_files='$OUT_DIR/data/train.parquet'" \
    "data.val_files='$OUT_DIR/data/test.parquet'" \
    data.train_batch_size=16 \
    data.max_prompt_length=24 \
    data.max_response_length=40 \
    "actor_rollout_ref.model.path='$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface'" \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$HERE/config/agent.yaml" \
    actor_rollout_ref.rollout.agent.default_agent_loop=collabllm_agent \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=2 \
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable \
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$HERE/config/collabllm_interaction_config.yaml" \
    reward_model.reward_manager=collabllm \
    +reward_model.reward_kwargs.metric_weights.accuracy=1 \
    +reward_model.reward_kwargs.metric_weights.token_amount=-0.01 \
    +reward_model.reward_kwargs.llm_judge_kwargs.base_url="http://127.0.0.1:$PORT" \
    custom_reward_function.path="$HERE/reward_function.py" \
    custom_reward_function.name=conversation_level_reward_func \
    trainer.project_name=collabllm \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir='$OUT_DIR/grpo'" \
    "trainer.validation_data_dir='$OUT_DIR/grpo/validation'" \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=5 \
    trainer.save_freq="$STEPS" \
    "$@"
