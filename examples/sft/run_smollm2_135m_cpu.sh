#!/usr/bin/env bash
# Supervised fine-tuning of a real pretrained model on CPU: SmolLM2-135M-Instruct on sums of two numbers below 50.
# examples/smollm2_135m/README.md says what to install. examples/grpo_trainer/run_smollm2_135m_cpu.sh can go on from here.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/smollm2_135m}"
MODEL_PATH="${MODEL_PATH:-$OUT_DIR/model}"

[ -f "$MODEL_PATH/config.json" ] || python3 examples/smollm2_135m/make_model.py --save-dir "$MODEL_PATH"
python3 examples/smollm2_135m/make_data.py --save-dir "$OUT_DIR/data"

python3 -m verl.trainer.sft_trainer \
    data.train_files="$OUT_DIR/data/sft_train.parquet" \
    data.val_files="$OUT_DIR/data/sft_test.parquet" \
    data.train_batch_size=16 \
    data.max_token_len_per_gpu=2048 \
    data.max_length=96 \
    model.path="$MODEL_PATH" \
    model.use_remove_padding=true \
    model.enable_gradient_checkpointing=false \
    optim.lr=3e-5 \
    optim.lr_warmup_steps_ratio=0.1 \
    checkpoint.save_contents='[hf_model]' \
    trainer.device=cpu \
    trainer.logger='[]' \
    trainer.project_name=smollm2_135m \
    trainer.experiment_name=sft \
    trainer.default_local_dir="$OUT_DIR/sft" \
    trainer.total_epochs=1 \
    trainer.total_training_steps=100 \
    trainer.save_freq=1000 \
    trainer.test_freq=25 \
    "$@"
