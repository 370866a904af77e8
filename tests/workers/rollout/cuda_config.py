"""Print what vLLM makes of our engine arguments on a CUDA machine, as JSON; run it in a process of its own.

vLLM's platform class for CUDA decides, as on such a machine. Only what asks a driver is stubbed: NVML, which answers
as one node of eight H100, and the import of the CUDA kernels, which a configuration does not call.
"""

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from verl.utils import device

DEVICES, MEMORY_BYTES = 8, 80 << 30
LAYOUTS: dict[str, tuple[bool, int]] = {"hybrid": (False, 1), "hybrid tp 2": (False, 2), "standalone tp 2": (True, 2)}
"""By name: whether the engine is standalone, and its tensor-parallel size."""


def stub_driver() -> None:
    """Answer what vLLM asks of the driver of a CUDA machine."""
    attention = [f"vllm_flash_attn._vllm_fa{version}_C" for version in (2, 3)]
    for kernels in ("_C_stable_libtorch", "_moe_C_stable_libtorch", *attention):
        sys.modules[f"vllm.{kernels}"] = ModuleType(kernels)
    from vllm.third_party import pynvml

    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": DEVICES,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": mock.Mock(total=MEMORY_BYTES, free=MEMORY_BYTES, used=0),
        "nvmlDeviceGetP2PStatus": pynvml.NVML_P2P_STATUS_OK,
    }
    for name, answer in answers.items():
        setattr(pynvml, name, mock.Mock(return_value=answer))
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"

    from vllm import platforms
    from vllm.platforms import cuda

    platforms.current_platform = cuda.NvmlCudaPlatform()
    from vllm import _custom_ops
    from vllm.config import vllm as vllm_config
    from vllm.device_allocator import cumem

    cumem.cumem_available = True  # its extension is among the CUDA kernels
    vllm_config.HAS_TRITON = True  # torch's CUDA builds bring it; without a GPU vLLM turns it off
    for name in [name for name in vars(_custom_ops) if "_supports_" in name]:  # which kernels of quantized layers run
        setattr(_custom_ops, name, lambda *args: False)
    torch.cuda.device_count = lambda: DEVICES
    torch.cuda.is_available = lambda: True
    device.is_cuda_available = True  # verl's own question


def families() -> dict[str, Any]:
    """Return the configurations of the families of the examples: real shapes, few layers."""
    import transformers as hf

    moe = {"num_experts": 8, "num_experts_per_tok": 2}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    routed = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    return {
        "llama": hf.LlamaConfig(num_hidden_layers=2, architectures=["LlamaForCausalLM"]),
        "mistral": hf.MistralConfig(num_hidden_layers=2, sliding_window=None, architectures=["MistralForCausalLM"]),
        "gemma": hf.GemmaConfig(num_hidden_layers=2, architectures=["GemmaForCausalLM"]),
        "gemma2": hf.Gemma2Config(num_hidden_layers=2, architectures=["Gemma2ForCausalLM"]),
        "qwen2": hf.Qwen2Config(num_hidden_layers=2, architectures=["Qwen2ForCausalLM"]),
        "qwen2_moe": hf.Qwen2MoeConfig(num_hidden_layers=2, **moe, architectures=["Qwen2MoeForCausalLM"]),
        "qwen3": hf.Qwen3Config(num_hidden_layers=2, architectures=["Qwen3ForCausalLM"]),
        "qwen3_moe": hf.Qwen3MoeConfig(num_hidden_layers=2, **moe, architectures=["Qwen3MoeForCausalLM"]),
        "deepseek_v2": hf.DeepseekV2Config(
            num_hidden_layers=2, **latent, **routed, architectures=["DeepseekV2ForCausalLM"]
        ),
        "deepseek_v3": hf.DeepseekV3Config(
            num_hidden_layers=2, **latent, **routed, architectures=["DeepseekV3ForCausalLM"]
        ),
        "glm4_moe": hf.Glm4MoeConfig(
            num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=2, architectures=["Glm4MoeForCausalLM"]
        ),
        "glm4v": hf.Glm4vConfig(architectures=["Glm4vForConditionalGeneration"]),
        "qwen2_5_vl": hf.Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]),
        "qwen3_vl": hf.Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"]),
        "qwen3_vl_moe": hf.Qwen3VLMoeConfig(architectures=["Qwen3VLMoeForConditionalGeneration"]),
    }


def write_families(folder: Path) -> None:
    """Write the ``config.json`` of each family, and let vLLM look at its class.

    vLLM keeps what it finds in ``VLLM_CACHE_ROOT``. For a CUDA machine the import of the class needs the CUDA kernels.
    """
    from verl.workers.rollout.vllm_rollout import patch
    from verl.workers.rollout.vllm_rollout.importing import import_vllm

    import_vllm()
    patch.inspect_models_in_process()
    from vllm.model_executor.models.registry import ModelRegistry

    for family, hf_config in families().items():
        hf_config.save_pretrained(folder / family)
        ModelRegistry.models[hf_config.architectures[0]].inspect_model_cls()


def engine_config(folder: Path, standalone: bool, tensor_parallel: int) -> Any:
    """Return vLLM's configuration of our engine for the model of a folder."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.vllm_rollout.engine_args import build_engine_args

    config = RolloutConfig(
        name="vllm", prompt_length=512, response_length=512, tensor_model_parallel_size=tensor_parallel
    )
    model_config = HFModelConfig(path=str(folder), load_tokenizer=False)
    with ExitStack() as stack:
        if not standalone and tensor_parallel > 1:  # as in a worker of the trainer
            stack.enter_context(mock.patch("torch.distributed.is_initialized", return_value=True))
            stack.enter_context(mock.patch("torch.distributed.get_world_size", return_value=tensor_parallel))
        args = build_engine_args(config, model_config, standalone=standalone)
    return (AsyncEngineArgs if standalone else EngineArgs)(**args).create_engine_config()


def switched_on(config: Any) -> dict[str, Any]:
    """Return what is on in an engine's configuration, and what it decides about speed and memory."""
    compilation, scheduler, model = config.compilation_config, config.scheduler_config, config.model_config
    passes = dataclasses.asdict(compilation.pass_config)
    sizes = compilation.cudagraph_capture_sizes or []
    return {
        "model runner V2": bool(config.use_v2_model_runner),
        "async scheduling": bool(scheduler.async_scheduling),
        "chunked prefill": bool(scheduler.enable_chunked_prefill),
        "prefix caching": bool(config.cache_config.enable_prefix_caching),
        "sleep": bool(model.enable_sleep_mode),
        "eager": bool(model.enforce_eager),
        "compilation": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "graph sizes": [len(sizes), max(sizes, default=0)],
        "fusions": sorted(name for name, value in passes.items() if value is True),
        "custom operators": sorted(compilation.custom_ops),
        "executor": str(config.parallel_config.distributed_executor_backend),
        "own all-reduce": not config.parallel_config.disable_custom_all_reduce,
        "dtype": str(model.dtype),
        "log-probs": model.logprobs_mode,
    }


def print_configurations(folder: Path) -> None:
    """Print what is on by layout, with the families for which that is so."""
    import vllm

    stub_driver()
    found: dict[str, Any] = {"vllm": vllm.__version__}
    for layout, (standalone, tensor_parallel) in LAYOUTS.items():
        groups: dict[str, dict[str, Any]] = {}
        for family in sorted(path.name for path in folder.iterdir()):
            settings = switched_on(engine_config(folder / family, standalone, tensor_parallel))
            groups.setdefault(json.dumps(settings), {"families": [], **settings})["families"].append(family)
        found[layout] = list(groups.values())
    print(json.dumps(found))


if __name__ == "__main__":
    {"write": write_families, "print": print_configurations}[sys.argv[1]](Path(sys.argv[2]))
