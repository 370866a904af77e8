#!/usr/bin/env bash
# The whole recipe on CPU without a network: a few sums, a tiny Qwen2 with random weights, supervised training, scores before and after.
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/open_math_tiny_cpu}"
SFT_STEPS="${SFT_STEPS:-100}"
source "$(dirname "$0")/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").prepare_nvidia-OpenMathReasoning_sft" --source synthetic --local_save_dir "$OUT_DIR/data"
python3 -m "recipe.$(basename "$HERE").prepare_eval_dataset" --source synthetic --seed 1 --local_save_dir "$OUT_DIR/data"
python3 examples/tiny_model.py --save-dir "$OUT_DIR/base"

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    data.train_files="$OUT_DIR/data/cot_dataset.parquet" \
    data.train_batch_size=16 \
    data.max_length=160 \
    data.max_token_len_per_gpu=4096 \
    model.path="$OUT_DIR/base" \
    optim.lr=3e-3 \
    trainer.project_name=open_math_reasoning \
    trainer.experiment_name=tiny \
    trainer.default_local_dir="$OUT_DIR/sft" \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.max_ckpt_to_keep=null \
    "$@"

for model in base "sft/global_step_$SFT_STEPS/huggingface"; do
    responses="$OUT_DIR/responses_${model%%/*}.parquet"
    DATA_FILE="$OUT_DIR/data/eval_dataset.parquet" OUTPUT_PATH="$responses" MODEL_PATH="$OUT_DIR/$model" GPUS_PER_NODE=1 N=1 \
        bash "$HERE/run_generation.sh" \
        trainer.device=cpu \
        actor_rollout_ref.rollout.temperature=0 \
        actor_rollout_ref.rollout.top_p=1.0 \
        actor_rollout_ref.rollout.prompt_length=112 \
        actor_rollout_ref.rollout.response_length=32 \
        actor_rollout_ref.rollout.dtype=float32 \
        actor_rollout_ref.rollout.enforce_eager=true
    OUTPUT="$responses" bash "$HERE/run_eval.sh"
done
