#!/usr/bin/env bash
# Supervised fine-tuning on CPU: the warm-up of scripts/quickstart.sh, which prepares its model and data (or give others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-outputs/quickstart/base}"
OUT_DIR="${OUT_DIR:-outputs/sft_tiny_cpu}"

python3 -m verl.trainer.sft_trainer \
    "data.train_files='$DATA_DIR/sft_train.parquet'" \
    "data.val_files='$DATA_DIR/sft_test.parquet'" \
    data.train_batch_size=64 \
    data.max_length=96 \
    "model.path='$MODEL_PATH'" \
    model.use_remove_padding=true \
    model.enable_gradient_checkpointing=false \
    optim.lr=3e-3 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.1 \
    checkpoint.save_contents='[hf_model]' \
    trainer.device=cpu \
    trainer.logger='[]' \
    trainer.project_name=quickstart \
    trainer.experiment_name=sft \
    "trainer.default_local_dir='$OUT_DIR'" \
    trainer.total_epochs=2 \
    trainer.total_training_steps=200 \
    trainer.save_freq=1000 \
    trainer.test_freq=100 \
    trainer.max_ckpt_to_keep=1 \
    "$@"
