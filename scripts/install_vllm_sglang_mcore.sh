#!/usr/bin/env bash
# Installs verl with vLLM or SGLang, and Megatron-Core, for CUDA into the environment of `python3`.
# The versions are those of pyproject.toml. Not run so far: it needs a CUDA toolkit with nvcc.
#
#   bash scripts/install_vllm_sglang_mcore.sh [--help]
#
#   USE_SGLANG   1: SGLang in place of vLLM, since each pins a torch of its own
#   USE_VLLM     0: leave out vLLM
#   USE_MEGATRON 0: leave out Megatron-Core and Transformer Engine
#   USE_KERNELS  0: leave out flash-attn and the Liger kernels, which are compiled
#   MAX_JOBS     compilations at a time (32)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -gt 0 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "scripts/install_vllm_sglang_mcore.sh"
    case "$1" in -h | --help) exit 0 ;; *)
        printf 'error: unknown argument %s: write variables before the command\n' "$1" >&2
        exit 2
        ;;
    esac
fi
export MAX_JOBS="${MAX_JOBS:-32}"

say() { printf '[install %3ds] %s\n' "$SECONDS" "$*"; }
install() { python3 -m pip install --no-cache-dir "$@"; }

USE_SGLANG="${USE_SGLANG:-0}"
USE_VLLM="${USE_VLLM:-$((1 - USE_SGLANG))}"
if [ "$USE_SGLANG$USE_VLLM" = 11 ]; then
    printf 'error: USE_VLLM=1 and USE_SGLANG=1 pin two versions of torch: make an environment for each\n' >&2
    exit 2
fi
# One call, so that pip finds versions of torch and its companions that suit all parts.
extras=""
[ "$USE_VLLM" = 0 ] || extras+=",vllm"
[ "$USE_SGLANG" = 0 ] || extras+=",sglang"
[ "${USE_MEGATRON:-1}" = 0 ] || extras+=",mcore"
say "verl with its engines: ${extras#,}"
install -e ".[${extras#,}]"

say "data, scoring and tests"
install -e ".[geo,math,test]"

if [ "${USE_KERNELS:-1}" != 0 ]; then
    say "flash-attn and Liger kernels"
    install --no-build-isolation -e ".[gpu]"
fi
if [ "${USE_MEGATRON:-1}" != 0 ]; then
    say "Transformer Engine"
    NVTE_FRAMEWORK=pytorch install --no-build-isolation "transformer-engine[pytorch]"
fi

say "what this environment can run:"
python3 -m verl.utils.doctor
