"""Default environment variables of a run's processes; the module is light, since a launch imports it first."""

from collections.abc import Mapping

from verl.utils import envs

RUNTIME_ENV_VARS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "NCCL_CUMEM_ENABLE": "0",
}
# Megatron-Core needs a single hardware queue: communication then starts before the computation that overlaps it. FSDP
# and the rollout engines overlap kernels by CUDA streams, which a single queue would serialize.
MEGATRON_ENV_VARS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# Every worker process has one core. vLLM disables torch.set_num_threads, so the variable must be set before.
CPU_ENV_VARS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # On a CPU vLLM warns about twenty intended settings (eager mode, no Triton, no tokenizer).
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# A run on one machine needs the loopback interface only. torch's own rendezvous and stores listen on all interfaces.
LOOPBACK_ENV_VARS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def unset_variables(device: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults, and those in ``more``, that this process's environment does not set."""
    defaults = RUNTIME_ENV_VARS | (CPU_ENV_VARS if device == "cpu" else {}) | dict(more)
    return {name: value for name, value in defaults.items() if envs.read(name) is None}
