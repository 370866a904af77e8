#!/usr/bin/env bash
# The settings of DAPO with a code interpreter: the 32B model of run_qwen2-32b_sft.sh on DAPO-Math-17k, 8 nodes of 8 GPUs with 80 GB.
# Data first: hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir ~/data/DAPO-Math-17k, and yentinglin/aime_2025 to ~/data/aime_2025
set -euxo pipefail

HERE="$(dirname "$0")"
MODEL_PATH="${MODEL_PATH:-checkpoints/retool/qwen2.5-32b-sft/global_step_372/huggingface}"
NNODES="${NNODES:-8}"
train_sp=8
tokens=$((2048 + 20480))
source "$HERE/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${OFFLOAD[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/DAPO-Math-17k" \
    data.val_files="$DATA_DIR/aime_2025" \
    data.custom_cls.path="$HERE/retool.py" \
    data.custom_cls.name=CustomRLHFDataset \
    data.return_raw_chat=true \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=20480 \
    custom_reward_function.path="$HERE/retool.py" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$tokens" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$train_sp" \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=8 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 \
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1024 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/sandbox_fusion_tool_config.yaml" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=30 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((4 * tokens))" \
    trainer.project_name=retool \
    trainer.experiment_name=qwen2.5-32b_dapo \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=30 \
    trainer.total_epochs=1 \
    "$@"
