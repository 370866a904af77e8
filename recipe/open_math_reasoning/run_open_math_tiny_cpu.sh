#!/usr/bin/env bash
# The whole recipe on CPU without a network: a few sums, a tiny Qwen2 with random weights, supervised training, scores before and after.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/open_math_tiny_cpu}"
SFT_STEPS="${SFT_STEPS:-100}"

python3 -m recipe.open_math_reasoning.prepare_nvidia-OpenMathReasoning_sft --source synthetic --local_save_dir "$OUT_DIR/data"
python3 -m recipe.open_math_reasoning.prepare_eval_dataset --source synthetic --seed 1 --local_save_dir "$OUT_DIR/data"
python3 examples/tiny_model.py --save-dir "$OUT_DIR/base"

python3 -m verl.trainer.sft_trainer \
    data.train_files="$OUT_DIR/data/cot_dataset.parquet" \
    data.train_batch_size=16 \
    data.max_length=160 \
    data.max_token_len_per_gpu=4096 \
    model.path="$OUT_DIR/base" \
    model.use_remove_padding=true \
    model.enable_gradient_checkpointing=false \
    engine.model_dtype=fp32 \
    optim.lr=3e-3 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.1 \
    checkpoint.save_contents='[hf_model]' \
    trainer.device=cpu \
    trainer.logger='[]' \
    trainer.project_name=open_math_reasoning \
    trainer.experiment_name=tiny \
    trainer.default_local_dir="$OUT_DIR/sft" \
    trainer.total_epochs=1000 \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.save_freq=1000 \
    "$@"

for model in base "sft/global_step_$SFT_STEPS/huggingface"; do
    responses="$OUT_DIR/responses_${model%%/*}.parquet"
    python3 -m verl.trainer.main_generation \
        trainer.device=cpu \
        trainer.n_gpus_per_node=1 \
        data.path="$OUT_DIR/data/eval_dataset.parquet" \
        data.output_path="$responses" \
        data.n_samples=1 \
        model.path="$OUT_DIR/$model" \
        rollout.do_sample=false \
        rollout.prompt_length=112 \
        rollout.response_length=32 \
        rollout.dtype=float32
    OUTPUT="$responses" bash recipe/open_math_reasoning/run_eval.sh
done
