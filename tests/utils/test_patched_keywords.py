"""What takes the place of a function of a library hands keywords on that it does not know."""

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from verl.workers.rollout.vllm_rollout import patch as vllm_patch
from verl.workers.rollout.vllm_rollout.media import use_training_positions

NEW = {"keyword_of_a_later_version": 1}


class Reached(Exception):
    """The library's own function was called, with these keywords."""


def library(*args: Any, **keywords: Any) -> None:
    raise Reached(keywords)


def check_handed_on(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(Reached) as reached:
        call(*args, **NEW)
    assert reached.value.args[0].items() >= NEW.items()


def replaced_names(module: Any) -> set[str]:
    """Return the attributes of other objects that the functions of a module assign functions to."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    def makes_function(value: ast.expr) -> bool:
        if isinstance(value, ast.Call):  # classmethod(function)
            return bool(value.args) and makes_function(value.args[0])
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and makes_function(node.value):
            found |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    return found


STEP = SimpleNamespace(kv_cache_block_copies=None, scheduled_new_reqs=[])
ROWS = torch.zeros(1, 4)
ONE = (MagicMock(),)
NAME_SHARED_MEMORY = lambda: vllm_patch.name_shared_memory(1)  # noqa: E731

VLLM: dict[str, tuple[Callable[[], None], str, tuple[Any, ...]]] = {
    "dispatch_cpu_unquantized_gemm": (
        vllm_patch.keep_plain_weights,
        "vllm.model_executor.layers.utils",
        (torch.nn.Linear(1, 1), False),
    ),
    "_update_states": (
        vllm_patch.draw_seeds_by_counter,
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        (MagicMock(), STEP),
    ),
    "forward_cpu": (
        vllm_patch.draw_seeds_by_counter,
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
        (MagicMock(use_fp64_gumbel=False), ROWS, {}, None, None),
    ),
    "__init__": (vllm_patch.share_partial_blocks, "vllm.v1.core.sched.scheduler:Scheduler", ONE),
    "execute_model": (
        vllm_patch.share_partial_blocks,
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        (MagicMock(), STEP),
    ),
    "do_kv_cache_update": (
        vllm_patch.share_partial_blocks,
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        ONE * 6,
    ),
    "allocate_kv_cache": (vllm_patch.touch_cache_on_use, "vllm.v1.worker.gpu_model_runner", ()),
    "reset_prefix_cache": (vllm_patch.touch_cache_on_use, "vllm.v1.core.block_pool:BlockPool", ONE),
    "_distributed_args": (
        NAME_SHARED_MEMORY,
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher",
        ONE,
    ),
    "_run_in_subprocess": (vllm_patch.inspect_models_in_process, "vllm.model_executor.models.registry", ONE),
    "_rebind_kernels": (vllm_patch.replace_kernels_in_vllm_only, "vllm.triton_utils.dispatcher", ([],)),
}
"""By the name in vLLM: what replaces it, where, and how it is called."""

MANAGER: dict[str, tuple[Any, ...]] = {
    "get_computed_blocks": ONE,
    "allocate_slots": (MagicMock(), 1, 0, MagicMock()),
    "free": (MagicMock(**{"is_finished.return_value": False}),),
    "pop_blocks_for_free": (MagicMock(**{"is_finished.return_value": False}),),
    "cache_full_blocks": (MagicMock(), [], 0, 0),
}
"""By the name in a manager of vLLM's cache: how it is called."""

NOT_CALLED = {"_clear_cache", "__getattr__"}
"""What Python calls, with no keywords."""


def put_recorder(monkeypatch: pytest.MonkeyPatch, place: str, name: str) -> Any:
    owner = resolve_name(place)
    if inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name), classmethod):
        monkeypatch.setattr(owner, name, classmethod(library))
    elif inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name), staticmethod):
        monkeypatch.setattr(owner, name, staticmethod(library))
    else:
        monkeypatch.setattr(owner, name, library)
    return owner


def others_of(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all other places that a patch changes be as before when a test has ended."""
    for name, (_, place, *_) in table.items():
        owner = resolve_name(place)
        monkeypatch.setattr(owner, name, inspect.getattr_static(owner, name))


@pytest.mark.parametrize("name", VLLM)
def test_patches_of_vllm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    vllm_patch_import()
    others_of(VLLM, monkeypatch)
    install, place, args = VLLM[name]
    owner = put_recorder(monkeypatch, place, name)
    install()
    assert getattr(owner, name) is not library
    check_handed_on(getattr(owner, name), args)


def vllm_patch_import() -> None:
    from verl.workers.rollout.vllm_rollout.importing import import_vllm

    import_vllm()


@pytest.mark.parametrize("name", MANAGER)
def test_patches_of_a_cache_of_vllm(name: str) -> None:
    pool = SimpleNamespace(cache_full_blocks=library, cached_block_hashes_by_block={})
    manager = MagicMock(block_pool=pool, **{"coordinator.single_type_managers": [MagicMock()]})
    owner = pool if name == "cache_full_blocks" else manager
    setattr(owner, name, library)
    vllm_patch._find_partial_blocks(manager)
    assert getattr(owner, name) is not library
    check_handed_on(getattr(owner, name), MANAGER[name])


def test_no_patch_of_vllm_is_left_out() -> None:
    assert replaced_names(vllm_patch) == VLLM.keys() | MANAGER.keys() | NOT_CALLED


def test_positions_of_images_in_vllm() -> None:
    """They are training's; a keyword that the model's own function takes does not change them, another one fails."""
    hf_config = MagicMock(model_type="qwen2_5_vl")
    model: Any = SimpleNamespace()

    def of_model(input_tokens: list[int], mm_features: list[Any], known: int = 0) -> None:
        raise AssertionError("the model's own positions")

    model.get_mrope_input_positions = of_model
    with pytest.MonkeyPatch.context() as patch:
        rope = SimpleNamespace(
            image_token_id=5, video_token_id=6, positions=lambda ids, *_: torch.arange(len(ids)).expand(3, -1)
        )
        patch.setattr("verl.workers.rollout.vllm_rollout.media.config_rope", lambda config: rope)
        use_training_positions(model, hf_config)
    assert model.get_mrope_input_positions([1, 2], [], known=1)[1] == 0
    with pytest.raises(TypeError, match="keyword_of_a_later_version"):
        model.get_mrope_input_positions([1, 2], [], **NEW)


# ---- SGLang


def sglang_patches() -> dict[str, tuple[Callable[[], None], str, tuple[Any, ...]]]:
    from verl.workers.rollout.sglang_rollout import patch

    draws, srt = patch.draw_by_seeds, "sglang.srt"
    updater = f"{srt}.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
    topk = MagicMock(topk_ids=torch.zeros(1, 1, dtype=torch.long))
    return {
        "from_schedule_batch": (draws, f"{srt}.sampling.sampling_batch_info:SamplingBatchInfo", ONE * 2),
        "__init__": (draws, f"{srt}.layers.sampler:Sampler", ONE),
        "forward": (draws, f"{srt}.layers.sampler:Sampler", ONE),
        "compute_logprobs": (draws, f"{srt}.layers.logprob_processor:OutputLogprobProcessor", (MagicMock(), ROWS)),
        "sampling_from_probs_torch": (draws, f"{srt}.layers.sampler", (ROWS, ROWS, ROWS)),
        "top_k_top_p_min_p_sampling_from_probs_torch": (draws, f"{srt}.layers.sampler", (ROWS,) * 7),
        "apply": (
            patch.choose_products,
            f"{srt}.layers.quantization.unquant:UnquantizedLinearMethod",
            (MagicMock(), MagicMock(), ROWS),
        ),
        "_compute_lm_head": (
            patch.choose_products,
            f"{srt}.layers.logits_processor:LogitsProcessor",
            (MagicMock(), ROWS, MagicMock()),
        ),
        "moe_forward_native": (
            patch.skip_experts_of_others,
            f"{srt}.layers.moe.fused_moe_native",
            (MagicMock(), ROWS, topk, MagicMock()),
        ),
        "abort_request": (
            patch.answer_aborted,
            f"{srt}.managers.scheduler:Scheduler",
            (MagicMock(waiting_queue=[]), MagicMock()),
        ),
        "_record_scheduler_state_for_paused_engine": (
            patch.sleep_in_pauses,
            f"{srt}.managers.scheduler:Scheduler",
            ONE,
        ),
        "_check_token_based_finish": (patch.end_at_own_tokens, f"{srt}.managers.schedule_batch:Req", ONE * 2),
        "_prepare": (
            patch.penalise_tokens_of_prompts,
            f"{srt}.sampling.penaltylib.repetition_penalty:BatchedRepetitionPenalizer",
            ONE,
        ),
        "check_weights": (lambda: patch.answer_calls(MagicMock(), MagicMock()), updater, ONE * 2),
    }


SGLANG_NAMES = (
    "from_schedule_batch", "__init__", "forward", "compute_logprobs", "sampling_from_probs_torch",
    "top_k_top_p_min_p_sampling_from_probs_torch", "apply", "_compute_lm_head", "moe_forward_native", "abort_request",
    "_record_scheduler_state_for_paused_engine", "_check_token_based_finish", "_prepare", "check_weights",
)  # fmt: skip
SGLANG_ALONE = {
    "standardize_rope_params", "config_socket", "init_threads_binding", "process_mm_data_async",
}  # fmt: skip
"""What has a test of its own below."""


@pytest.fixture
def sglang_patch() -> ModuleType:
    pytest.importorskip("sglang")
    from verl.workers.rollout.sglang_rollout.importing import import_sglang

    import_sglang()
    return importlib.import_module("verl.workers.rollout.sglang_rollout.patch")


@pytest.mark.parametrize("name", SGLANG_NAMES)
def test_patches_of_sglang(name: str, sglang_patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = sglang_patches()
    others_of(table, monkeypatch)
    for alone in ("F",):
        module = resolve_name("sglang.srt.layers.moe.fused_moe_native")
        monkeypatch.setattr(module, alone, getattr(module, alone))
    install, place, args = table[name]
    owner = put_recorder(monkeypatch, place, name)
    install()
    assert getattr(owner, name) is not library
    check_handed_on(getattr(owner, name), args)


def test_the_tower_of_qwen2_5_vl_in_sglang(sglang_patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = resolve_name("sglang.srt.models.qwen2_5_vl:Qwen2_5_VisionTransformer")
    monkeypatch.setattr(tower, "forward", library)
    sglang_patch.see_frame_by_frame()
    check_handed_on(tower.forward, (MagicMock(), ROWS, torch.ones(1, 3, dtype=torch.long)))


def test_no_patch_of_sglang_is_left_out(sglang_patch: Any) -> None:
    assert replaced_names(sglang_patch) == {*SGLANG_NAMES, *SGLANG_ALONE}


def test_towers_in_sglang(sglang_patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config_class = resolve_name("transformers:PretrainedConfig")
    original = library

    def _safe_standardize(self: Any, **more: Any) -> None:
        original(self, **more)

    monkeypatch.setattr(config_class, "standardize_rope_params", _safe_standardize)
    monkeypatch.setattr(sglang_patch, "installed_version", lambda package: "0.5.21")
    sglang_patch.standardize_towers()
    assert config_class.standardize_rope_params is not _safe_standardize
    check_handed_on(config_class.standardize_rope_params, ONE)


def test_sockets_of_sglang(sglang_patch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = resolve_name("sglang.srt.utils.network")
    monkeypatch.setattr(network, "config_socket", library)
    opened: list[Any] = []
    with sglang_patch.sockets_in(tmp_path, opened):
        check_handed_on(network.config_socket, ONE)
        made = resolve_name("sglang.srt.server_args").tempfile.NamedTemporaryFile("w", suffix=".x")
        assert Path(made.name).parent == tmp_path and made.name.endswith(".x")
        made.close()
    assert network.config_socket is library


def test_threads_of_sglang(sglang_patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places = resolve_name("sglang.srt.utils.numa_utils")
    monkeypatch.setattr(places, "init_threads_binding", library)
    monkeypatch.setattr(sglang_patch, "has_sglang_kernels", lambda: False)
    sglang_patch.bind_no_threads()
    assert places.init_threads_binding(numa_index=0, world_size=2) is None
    with pytest.raises(Reached):
        places.init_threads_binding(numa_index=0, world_size=2, **NEW)


def test_media_of_sglang(sglang_patch: Any) -> None:
    import asyncio

    class Processor:
        async def process_mm_data_async(self, image_data: Any, audio_data: Any = None) -> None:
            raise AssertionError("encoded again")

    manager = SimpleNamespace(mm_processor=Processor())
    sglang_patch.take_encoded_media(manager)
    encode = manager.mm_processor.process_mm_data_async
    assert asyncio.run(encode(image_data=["encoded"], audio_data=None)) == "encoded"
    with pytest.raises(TypeError, match="keyword_of_a_later_version"):
        asyncio.run(encode(image_data=["encoded"], **NEW))


# ---- Megatron-Core


@pytest.mark.parametrize("name", ["_get_cuda_rng_state", "_set_cuda_rng_state", "maybe_move_tensor_to_cpu"])
def test_patches_of_megatron_on_a_cpu(name: str) -> None:
    from verl.utils.megatron import cpu_support

    module: Any = ModuleType("megatron_part")
    for each in ("_get_cuda_rng_state", "_set_cuda_rng_state", "maybe_move_tensor_to_cpu"):
        setattr(module, each, library)
    cpu_support._random_state_of_cpu(module)
    cpu_support._splits_on_host(module)
    check_handed_on(getattr(module, name), () if name.startswith("_get") else (torch.get_rng_state(),))
    assert torch.equal(module._get_cuda_rng_state(clone=True, graph_safe=True), torch.get_rng_state())


@pytest.mark.parametrize("name", ["_set_main_param_and_optimizer_states", "sharded_param_state_fully_reshardable"])
def test_patches_of_an_optimizer_of_megatron(name: str) -> None:
    pytest.importorskip("megatron.core")
    from verl.utils.megatron import optimizer as patched

    inner = SimpleNamespace(state={"weight": {"step": torch.ones(1)}}, param_groups=[{"params": ["weight"]}])
    optimizer: Any = SimpleNamespace(
        optimizer=inner, model_param_group_index_map={"weight": (0, 0)}, buffers=[], **{name: library}
    )
    (patched._restore_steps if name.startswith("_set") else patched._save_without_gaps)(optimizer)
    check_handed_on(getattr(optimizer, name), ("weight", {}))
