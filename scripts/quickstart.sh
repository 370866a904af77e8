#!/usr/bin/env bash
# From a bare clone to a model that has learned by reinforcement learning, without a GPU: environment, data, a small base
# model, a supervised warm-up, then GRPO with vLLM. Every command is printed as it runs, so that it can be copied and changed.
# Stages whose output is complete are skipped, and a training that was interrupted goes on from its last checkpoint.
#
#   bash scripts/quickstart.sh [options] [-- key=value ...]
#
#   --seed N      of data, model and run (1)
#   --steps N     training steps (40)
#   --workers N   worker processes that share model and batch (1)
#   --out DIR     where everything goes (outputs/quickstart)
#   -- ...        Hydra overrides for the training command
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,12s/^# \{0,1\}//p' scripts/quickstart.sh; }
fail() { printf '\nquickstart: %s\n' "$*" >&2; exit 1; }
say() { printf '\n[quickstart %4ds] %s\n' "$SECONDS" "$*"; }
misused() { echo "quickstart: $1 (see --help)" >&2; exit 2; }

SEED=1 STEPS=40 WORKERS=1 OUT=outputs/quickstart
while [ $# -gt 0 ]; do
    case "$1" in
        --seed | --steps | --workers)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || misused "$1 needs a number, got '${2:-}'"
            case "$1" in --seed) SEED=$2 ;; --steps) STEPS=$2 ;; --workers) WORKERS=$2 ;; esac
            shift
            ;;
        --out) OUT="${2:-}"; [ -n "$OUT" ] || misused "--out needs a folder"; shift ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) misused "unknown option $1" ;;
    esac
    shift
done
OVERRIDES=("$@")

DATA="$OUT/data" BASE="$OUT/base" SFT="$OUT/sft" RUN="$OUT/grpo"
VENV="${VERL_VENV:-.venv}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # one core for each worker process
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Run a command with the Python of the environment, and print it first.
run() {
    printf '$'
    printf ' %q' "$@"
    printf '\n'
    env PATH="$(cd "$VENV/bin" && pwd):$PATH" "$@" ||
        fail "that command failed (see above). When the cause is gone, run the quick start again: finished stages are kept."
}

# stage NAME FOLDER COMMAND...: run the command unless it has run to its end into that folder.
stage() {
    local name="$1" folder="$2"
    shift 2
    if [ -f "$folder/.complete" ]; then
        say "$name: done before ($folder)"
        return
    fi
    say "$name"
    run "$@"
    touch "$folder/.complete"
}

latest() { cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

check_settings() {
    local settings="--seed $SEED --workers $WORKERS" before
    mkdir -p "$OUT"
    before="$(cat "$OUT/settings" 2>/dev/null || echo "$settings")"
    [ "$before" = "$settings" ] ||
        fail "$OUT holds a run with $before; now it is $settings. Give another --out, or remove it: rm -r $OUT"
    echo "$settings" >"$OUT/settings"
    settings="${OVERRIDES[*]+${OVERRIDES[*]}}"
    before="$(cat "$RUN.overrides" 2>/dev/null || echo "$settings")"
    [ "$before" = "$settings" ] || [ "$(latest "$RUN")" = 0 ] ||
        fail "$RUN holds a run with the overrides '$before'; now they are '$settings'. To train anew from the same base model: rm -r $RUN"
    echo "$settings" >"$RUN.overrides"
}

train() {
    if [ "$(latest "$RUN")" -ge "$STEPS" ] && [ -f "$RUN/curves.png" ]; then
        say "GRPO: done before ($RUN)"
        return
    fi
    say "GRPO, $STEPS steps on $WORKERS worker(s)"
    run env DATA_DIR="$DATA" MODEL_PATH="$SFT/global_step_$(latest "$SFT")/huggingface" OUT_DIR="$RUN" WORKERS="$WORKERS" \
        bash examples/grpo_trainer/run_tiny_cpu.sh trainer.total_training_steps="$STEPS" trainer.seed="$SEED" \
        ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}

report() {
    "$VENV/bin/python" - "$RUN" <<'PYTHON'
import sys
from pathlib import Path

from verl.utils.observe.record import read_record

run = Path(sys.argv[1])
metrics = run / "metrics.jsonl"
if not metrics.is_file():
    sys.exit(f"{run} holds no metrics.jsonl: look in the trainer.default_local_dir that you gave")
scores = {}
for step, values in read_record(metrics).items():
    found = [value for key, value in values.items() if key.startswith("val-core/")]
    if found:
        scores[step] = sum(found) / len(found)
if scores:
    first, last = min(scores), max(scores)
    print(f"Greedy validation accuracy: {scores[first]:.3f} after {first} steps, {scores[last]:.3f} after {last}")
else:
    print("There was no validation.")
checkpoints = sorted(run.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
print(f"  picture of the curves  {run}/curves.png")
print(f"  report                 {run}/report.html")
print(f"  metrics of each step   {metrics}")
print(f"  checkpoint             {checkpoints[-1] if checkpoints else 'none'}")
PYTHON
}

check_settings
say "environment: $VENV"
bash scripts/setup_env.sh
stage "data: sums in the format of GSM8K" "$DATA" \
    python examples/data_preprocess/gsm8k.py --source synthetic --local_save_dir "$DATA" --seed "$SEED"
stage "base model: a small Qwen2 with random weights" "$BASE" python examples/tiny_model.py --save-dir "$BASE" --seed "$SEED"
stage "supervised warm-up" "$SFT" \
    env DATA_DIR="$DATA" MODEL_PATH="$BASE" OUT_DIR="$SFT" bash examples/sft/run_tiny_cpu.sh trainer.seed="$SEED"
train
say "done"
report
