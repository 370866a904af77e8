"""Engines that have read no weights: a trainer's first stream fills all that they compute with, family by family.

The models are vLLM's own, without its engine. Nothing but NaN is in them before the update, nor in the memory that the
update allocates. They then equal a model that has read the files, bit for bit, derived tensors included.
"""

import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from tests import remote_code
from tests.ranks import spawn_ranks
from tests.workers.rollout import tiny
from verl.workers.rollout.unread import STREAMED, check_nothing_is_nan, fill_with_nan, stays_unread

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
LATENT = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "kv_lora_rank": 512, "q_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),  # as published
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
        | {"first_k_dense_replace": 1, "attention_bias": True},
    ),
}
"""Family -> transformers' prefix of its classes, and the fields of a small model."""


def write(folder: Path, family: str) -> list[tuple[str, Tensor]]:
    """Write a small model of a family to a folder, and return its weights as the trainer streams them."""
    from verl.workers.engine.fsdp.adapters import merged_weights
    from verl.workers.engine.fsdp.build import checkpoint_names

    model = build(folder, family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    stream = list(checkpoint_names(model, merged_weights(model)))
    save_file({name: tensor.contiguous() for name, tensor in stream}, folder / "model.safetensors", {"format": "pt"})
    return stream


def build(folder: Path, family: str) -> Any:
    import transformers

    from tests.workers.rollout import vision

    if family == "kimi_vl":  # with the router of training, by which the files below are read, too
        sizes = {"topk_method": "greedy", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        return remote_code.load(remote_code.write_model(folder, family, **sizes))
    if family not in TEXT:
        return vision.make_model(folder, family)[0]
    kind, changes = TEXT[family]
    shape: dict[str, Any] = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": tiny.EOS,
        "pad_token_id": tiny.PAD,
    }
    config = getattr(transformers, f"{kind}Config")(**(shape | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    tiny.disturb(model, 0.1, seed=1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of a router
            buffer.uniform_(-0.2, 0.2)
    return model


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model: parameters, buffers, and those that are plain attributes of its layers."""
    found = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        own = ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))
        found |= {f"{path}:{name}": value.detach().clone() for name, value in own if value.is_floating_point()}
    return found


class VLLM:
    """Builds vLLM's models, and updates them as its worker does."""

    def __init__(self, folder: Path) -> None:
        from verl.workers.rollout.vllm_rollout import patch
        from verl.workers.rollout.vllm_rollout.importing import import_vllm

        import_vllm()
        patch.inspect_models_in_process()
        from vllm.model_executor.model_loader import dummy_loader

        dummy_loader.initialize_single_dummy_weight = lambda tensor: tensor.detach().fill_(torch.nan)
        torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for a CPU does
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)

    def model(self, folder: Path, load_format: str) -> nn.Module:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        from verl.workers.rollout.vllm_rollout.engine_args import build_engine_args

        args = build_engine_args(*settings("vllm", folder, load_format))
        built = EngineArgs(**args).create_engine_config()
        with set_current_vllm_config(built):
            parallel_state.init_distributed_environment(backend="gloo")
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()  # only models with experts have a group of them
            self._model_config = built.model_config
            return get_model(vllm_config=built)

    def update(self, model: nn.Module, stream: list[tuple[str, Tensor]]) -> None:
        from verl.workers.rollout.vllm_rollout.weights import EngineWeights

        weights = EngineWeights(model, self._model_config, torch.device("cpu"), is_unread=True)
        weights.begin()
        weights.load(stream)
        weights.finish()


class SGLang:
    """Builds SGLang's models, and updates them as its scheduler does."""

    def __init__(self, folder: Path) -> None:
        from verl.workers.rollout.sglang_rollout import patch
        from verl.workers.rollout.sglang_rollout.importing import import_sglang

        import_sglang()
        patch.apply(False)
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = fill_with_nan
        self._loader: Any = loader
        self._parallel: Any = parallel_state
        self._meeting = f"file://{folder}/rendezvous"

    def model(self, folder: Path, load_format: str) -> nn.Module:
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        from verl.workers.rollout.sglang_rollout.engine_args import build_engine_args

        args = ServerArgs(**build_engine_args(*settings("sglang", folder, load_format)))
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        initialize_moe_config()
        if not dist.is_initialized():
            meeting = {"distributed_init_method": self._meeting, "backend": "gloo"}
            self._parallel.init_distributed_environment(world_size=1, rank=0, local_rank=0, **meeting)
            self._parallel.initialize_model_parallel()
            dp_attention.initialize_dp_attention(args)
        model_config = ModelConfig.from_server_args(args)
        dp_attention.init_dp_gathered_buffer(model_config)
        loader = self._loader.get_model_loader(LoadConfig(load_format=load_format), model_config)
        built: nn.Module = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu", 0))
        return built

    def update(self, model: nn.Module, stream: list[tuple[str, Tensor]]) -> None:
        from verl.workers.rollout.sglang_rollout.weights import EngineWeights

        weights = EngineWeights(model, is_unread=True)
        weights.begin()
        self._loader.DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))
        weights.load(stream)
        weights.check_complete()
        self._loader.post_load_weights(model)
        self._loader.DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
        weights.verify()


def settings(engine: str, folder: Path, load_format: str) -> tuple[Any, Any]:
    """Return what an engine is configured by."""
    from verl.workers.config import HFModelConfig

    config = tiny.rollout_config(engine, load_format=load_format, max_model_len=32)
    return config, HFModelConfig(path=str(folder), load_tokenizer=False, trust_remote_code=True)


def check_family(engine: "VLLM | SGLang", folder: Path, family: str) -> None:
    stream = write(folder, family)
    expected = held_by(engine.model(folder, "auto"))
    model = engine.model(folder, "dummy")
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    try:
        engine.update(model, stream)
    finally:
        torch.use_deterministic_algorithms(False)
    found = held_by(model)
    assert found.keys() == expected.keys()
    differing = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not differing, differing


def _run(rank: int, folder: Path, name: str) -> None:
    engine = {"vllm": VLLM, "sglang": SGLang}[name](folder)
    gc.freeze()  # vLLM collects garbage after each load
    wrong = {}
    for family in sorted(STREAMED[name]):
        try:
            check_family(engine, folder / family, family)
        except Exception as error:  # of one family: its own test tells it
            wrong[family] = f"{type(error).__name__}: {error}"
    (folder / "wrong.json").write_text(json.dumps(wrong))


def test_what_an_update_leaves_out_is_named() -> None:
    """What the model has computed stays."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("angles", torch.ones(1), persistent=False)
    model.register_buffer("number", torch.ones(1, dtype=torch.int64))
    fill_with_nan(model)
    assert model.angles == 1 and model.number == 1
    with pytest.raises(RuntimeError, match="3 of its tensors are NaN .*, such as bias: .*load_format=auto"):
        check_nothing_is_nan(model)
    for name in ("weight", "bias", "scale"):
        getattr(model, name).data.zero_()
    check_nothing_is_nan(model)
    model.weight.data[1, 0] = torch.nan
    with pytest.raises(RuntimeError, match="1 of its tensors are NaN .*, such as weight"):
        check_nothing_is_nan(model)


@pytest.mark.parametrize(
    ("engine", "family", "arguments", "is_unread"),
    [
        ("vllm", "llama", {}, True),
        ("vllm", "llama", {"attention_backend": "FLASHINFER"}, True),
        ("vllm", "llama", {"quantization": "fp8"}, False),
        ("vllm", "llama", {"speculative_config": {}}, False),
        ("vllm", "a_new_one", {}, False),
        ("sglang", "qwen2", {}, True),
        ("sglang", "qwen2", {"speculative_algorithm": "EAGLE"}, False),
        ("examples.rollout_engine.min_p.MinPRollout", "llama", {}, False),
    ],
)
def test_files_are_read_where_nothing_is_shown(
    engine: str, family: str, arguments: dict[str, Any], is_unread: bool
) -> None:
    config = tiny.rollout_config(engine, engine_kwargs={engine: arguments})
    model: Any = SimpleNamespace(model_type=family)
    assert stays_unread(config, model) is is_unread
    model.quantization_config = {"quant_method": "fp8"}
    assert not stays_unread(config, model)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Returns what is wrong with the families of an engine, by family; one process looks at all of them."""

    @cache
    def wrong_with(engine: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(engine)
        spawn_ranks(_run, (folder, engine), nprocs=1)
        found: dict[str, str] = json.loads((folder / "wrong.json").read_text())
        return found

    return wrong_with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "family"), [(engine, family) for engine in STREAMED for family in sorted(STREAMED[engine])]
)
def test_a_stream_fills_an_engine_that_has_read_nothing(
    wrong: Callable[[str], dict[str, str]], engine: str, family: str
) -> None:
    pytest.importorskip(engine)
    assert family not in wrong(engine), wrong(engine)[family]
