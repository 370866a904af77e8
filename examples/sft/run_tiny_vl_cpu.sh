#!/usr/bin/env bash
# Supervised fine-tuning with images on CPU, from nothing: drawn figures, and a tiny Qwen2.5-VL with random weights.
# KIND is qwen2_vl, qwen2_5_vl or qwen3_vl. examples/grpo_trainer/run_tiny_vl_cpu.sh goes on from here.
set -euxo pipefail

KIND="${KIND:-qwen2_5_vl}"
OUT_DIR="${OUT_DIR:-outputs/tiny_vl_cpu}"

python3 examples/data_preprocess/geo3k.py --synthetic --local_save_dir "$OUT_DIR/data"
python3 examples/tiny_model.py --kind "$KIND" --hidden-size 64 --save-dir "$OUT_DIR/base"

python3 -m verl.trainer.sft_trainer \
    data.train_files="$OUT_DIR/data/sft_train.parquet" \
    data.train_batch_size=32 \
    data.max_token_len_per_gpu=4096 \
    data.max_length=64 \
    model.path="$OUT_DIR/base" \
    model.use_remove_padding=true \
    model.enable_gradient_checkpointing=false \
    optim.lr=2e-3 \
    optim.lr_warmup_steps_ratio=0.05 \
    checkpoint.save_contents='[hf_model]' \
    trainer.device=cpu \
    trainer.logger='[]' \
    trainer.default_local_dir="$OUT_DIR/sft" \
    trainer.total_epochs=10 \
    trainer.total_training_steps=120 \
    trainer.save_freq=1000 \
    "$@"
