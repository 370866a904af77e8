#!/usr/bin/env bash
# The settings of DAPO with a code interpreter (recipe/retool): Qwen3-4B on DAPO-Math-17k, one node of 8 GPUs with 80 GB.
# Data first: hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir ~/data/DAPO-Math-17k, and Maxwell-Jia/AIME_2024 to ~/data/AIME_2024
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euxo pipefail

ENGINE="${ENGINE:-sglang}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-4B-Instruct-2507}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${OFFLOAD[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/DAPO-Math-17k" \
    data.val_files="$DATA_DIR/AIME_2024" \
    data.custom_cls.path=recipe/retool/retool.py \
    data.custom_cls.name=CustomRLHFDataset \
    data.return_raw_chat=true \
    data.train_batch_size=64 \
    data.max_prompt_length=2048 \
    data.max_response_length=16384 \
    custom_reward_function.path=recipe/retool/retool.py \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.75 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=16 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16 \
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1024 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=recipe/retool/sandbox_fusion_tool_config.yaml \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=73728 \
    trainer.project_name=dapo_multiturn \
    trainer.experiment_name=qwen3_4b \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=10 \
    trainer.total_epochs=1 \
    "$@"
