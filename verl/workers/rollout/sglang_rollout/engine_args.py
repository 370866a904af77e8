"""Turn the rollout config into SGLang's arguments, with the checks that SGLang makes late or not at all."""

import json
from typing import TYPE_CHECKING, Any

from verl.errors import WrongInput
from verl.utils.device import get_device_name
from verl.utils.engine_arguments import sglang_arguments
from verl.utils.engine_versions import has_sglang_kernels
from verl.workers.config.model import sglang_problem
from verl.workers.config.overrides import merged
from verl.workers.rollout.engine_rope import engine_rope
from verl.workers.rollout.engine_settings import check_context, check_prefill, cpu_cache_tokens, engine_dtype

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

SPARE_TOKENS = 8
"""How much longer SGLang's context is than ours: it keeps five tokens back from prompts and two from responses."""
LONGER_CONTEXT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""The variable that lets SGLang's context exceed the model's by the spare tokens, which no request reaches."""

_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # else a scheduler without requests takes a core from the trainer
    "mem_fraction_static": 0.99,  # share of the machine's memory, whoever uses it; max_total_tokens is the limit
}


def build_engine_args(
    config: "RolloutConfig", model_config: "HFModelConfig", is_hybrid: bool = False
) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs``; ``engine_kwargs.sglang`` overrides them.

    Args: a hybrid engine takes turns with the trainer on its devices.
    Raises: WrongInput naming the key of a value that cannot work.
    """
    on_cpu = get_device_name() == "cpu"
    hf_config = model_config.hf_config
    context = check_context(config, hf_config)
    check_prefill(config, context)
    _check_model(model_config)
    own = dict(config.engine_kwargs.get("sglang") or {})
    overrides = merged(model_config.config_changes(), engine_rope("sglang", hf_config, context, SPARE_TOKENS))
    overrides = merged(overrides, json.loads(own.pop("json_model_override_args", None) or "{}"))
    args: dict[str, Any] = {
        "model_path": model_config.local_path,
        "tokenizer_path": model_config.local_tokenizer_path,
        "trust_remote_code": model_config.trust_remote_code,
        "json_model_override_args": json.dumps(overrides),
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "load_format": config.load_format,
        "dtype": str(engine_dtype(config, hf_config)).removeprefix("torch."),  # SGLang's auto turns fp32 into fp16
        "random_seed": config.seed,
        "context_length": context + SPARE_TOKENS,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "disable_radix_cache": not config.enable_prefix_caching,
        "tp_size": config.tensor_model_parallel_size,
        "dp_size": config.data_parallel_size,
        "ep_size": config.expert_parallel_size,
        "sampling_backend": "pytorch",  # the one that draws by the seeds of requests
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_cuda_graph": config.enforce_eager,
        "log_level": "error" if config.disable_log_stats else "info",
    }
    if on_cpu:
        args |= _ON_CPU | {"max_total_tokens": cpu_cache_tokens(config, hf_config, context + SPARE_TOKENS)}
    else:
        args |= _on_accelerator(config, is_hybrid)
    args |= own
    return {name: value for name, value in args.items() if value is not None}


def _on_accelerator(config: "RolloutConfig", is_hybrid: bool) -> dict[str, Any]:
    args: dict[str, Any] = {"enable_memory_saver": is_hybrid and config.free_cache_engine}
    if config.batch_invariant:
        args["enable_deterministic_inference"] = True
    if config.cudagraph_capture_sizes and not config.enforce_eager:
        sizes = "cuda_graph_bs_decode" if "cuda_graph_bs_decode" in sglang_arguments() else "cuda_graph_bs"
        args[sizes] = list(config.cudagraph_capture_sizes)
    return args


def _check_model(model_config: "HFModelConfig") -> None:
    if model_config.local_hf_config_path != model_config.local_path:
        raise WrongInput(
            f"actor_rollout_ref.model.hf_config_path={model_config.hf_config_path}: SGLang reads config.json in the "
            "folder of the weights: write null, and changes into override_config"
        )
    hf_config = model_config.hf_config
    lacks_kernels = get_device_name() == "cpu" and not has_sglang_kernels()
    if problem := sglang_problem(hf_config.model_type, hasattr(hf_config, "vision_config"), lacks_kernels):
        raise WrongInput(f"actor_rollout_ref.rollout.name=sglang: {problem}")
