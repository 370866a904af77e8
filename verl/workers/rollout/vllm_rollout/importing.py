"""Import of vLLM into a process that also trains: environment, import and patches."""

import importlib
import logging
import warnings
from types import ModuleType

from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.import_utils import hidden
from verl.workers.rollout.vllm_rollout import patch
from verl.workers.rollout.vllm_rollout.tracing import import_traces_on_use

_ENVIRONMENT = {
    # The engine runs in this process, step by step on request, next to the training engine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT = {
    # On a CPU it warns about twenty intended settings (eager mode, no Triton, no tokenizer).
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Ray decides where a worker runs; binding threads would pin every worker of a machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling the sampler takes 12 s at the first batch and does not speed up the batch sizes of a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}


def import_vllm(batch_invariant: bool | None = None) -> ModuleType:
    """Import and patch vLLM, with the environment for an engine in a training process; repeated calls are cheap.

    ``batch_invariant`` says, for the engines that start from now on, whether no response may depend on the others of
    its batch; None leaves this as it is.

    Raises: ImportError naming the package to install.
    """
    on_cpu = get_device_name() == "cpu"
    envs.write({"VLLM_ENABLE_V1_MULTIPROCESSING": _ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"]})
    if batch_invariant and not on_cpu:  # a CPU has no kernels for it: see patch.choose_products
        envs.write({"VLLM_BATCH_INVARIANT": "1"})
    envs.write_default(_ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu else {}))
    # vLLM logs warnings before it reads this variable.
    logging.getLogger("vllm").setLevel(envs.read("VLLM_LOGGING_LEVEL", "INFO") or "INFO")
    try:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")  # deprecations of torch
        with hidden(_without_use_on_a_cpu() if on_cpu else ()):
            vllm = importlib.import_module("vllm")
            import_traces_on_use()
            vllm.LLM  # noqa: B018 (vLLM imports its parts on first access)
    except ImportError as error:
        device = get_device_name()
        install = "vllm and vllm-ascend" if device == "npu" else f"'verl[{'cpu' if on_cpu else 'vllm'}]'"
        raise ImportError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM, which cannot be imported ({error}): "
            f"pip install {install}, or set rollout.name=hf"
        ) from error
    patch.apply(on_cpu=on_cpu)
    if batch_invariant is not None:
        patch.choose_products(batch_invariant)
    return vllm


_COMPILER = "torch._inductor.lowering"
_MEDIA = ("av", "cv2")


def _without_use_on_a_cpu() -> list[str]:
    """Return the optional packages of vLLM that a text model on a CPU does not use.

    vLLM adds its operators to a list of torch's compiler, whose import takes a CPU second, and 80 MB in a forked
    worker. vLLM also imports decoders of audio and video (30 MB), which ``patch.load_media_on_use`` imports when used.
    """
    return [*_MEDIA, *([_COMPILER] if envs.read("TORCHDYNAMO_DISABLE") == "1" else [])]
