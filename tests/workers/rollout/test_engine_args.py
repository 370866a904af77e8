"""Engine arguments from the config, and the sizes that are refused before an engine starts."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.rollout import tiny
from verl.utils.engine_arguments import sglang_arguments as known_arguments
from verl.workers.rollout import build_rollout, get_rollout_class
from verl.workers.rollout.base import check_prompt_lengths, eos_token_ids, pad_rows, prompt_token_ids, sampling_values
from verl.workers.rollout.sglang_rollout import engine_args as sglang_args
from verl.workers.rollout.vllm_rollout import engine_args, vllm_rollout

GRAPHS = "cuda_graph_bs_decode" if "cuda_graph_bs_decode" in known_arguments() else "cuda_graph_bs"
MODEL = SimpleNamespace(
    local_path="/models/tiny",
    local_hf_config_path="/models/tiny",
    local_tokenizer_path="/models/tiny",
    trust_remote_code=False,
    override_config={},
    config_changes=lambda: {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
)


@pytest.fixture
def model_config() -> Any:
    MODEL.hf_config = tiny.build_model().config
    return MODEL


def build(model_config: Any, **changes: Any) -> dict[str, Any]:
    pytest.importorskip("vllm")
    return engine_args.build_engine_args(tiny.rollout_config("vllm", **changes), model_config)


def test_arguments(model_config: Any) -> None:
    args = build(model_config, engine_kwargs={"vllm": {"max_num_seqs": 7, "swap_space": None}}, seed=5)
    assert args["model"] == "/models/tiny"
    assert args["max_model_len"] == tiny.PROMPT_LENGTH + tiny.RESPONSE_LENGTH
    assert args["max_num_seqs"] == 7
    assert args["seed"] == 5
    assert args["hf_overrides"] == MODEL.config_changes()
    assert args["logprobs_mode"] == "processed_logprobs"
    assert None not in args.values()
    assert build(model_config, max_model_len=40)["max_model_len"] == 40


def sglang_arguments(model_config: Any, **changes: Any) -> dict[str, Any]:
    pytest.importorskip("sglang")
    return sglang_args.build_engine_args(tiny.rollout_config("sglang", **changes), model_config, is_hybrid=True)


def test_arguments_of_sglang(model_config: Any) -> None:
    own = {"max_running_requests": 7, "stream_interval": None}
    args = sglang_arguments(model_config, engine_kwargs={"sglang": own}, seed=5, enable_prefix_caching=False)
    assert args["model_path"] == "/models/tiny"
    assert args["context_length"] == tiny.PROMPT_LENGTH + tiny.RESPONSE_LENGTH + sglang_args.SPARE_TOKENS
    assert args["max_running_requests"] == 7
    assert args["random_seed"] == 5
    assert json.loads(args["json_model_override_args"]) == MODEL.config_changes()
    assert args["disable_radix_cache"] and args["chunked_prefill_size"] == 40
    assert None not in args.values()
    assert sglang_arguments(model_config, dtype="auto")["dtype"] == "float32"  # SGLang's own auto takes fp16 for it
    whole = sglang_arguments(model_config, enable_chunked_prefill=False)
    assert (whole["chunked_prefill_size"], whole["max_prefill_tokens"]) == (-1, 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cache of the CPU engine")
def test_the_cache_of_sglang_does_not_take_the_memory_of_the_machine(model_config: Any) -> None:
    args = sglang_arguments(model_config)
    assert args["device"] == "cpu" and args["attention_backend"] == "torch_native"
    assert args["max_total_tokens"] == 32 * (args["context_length"] + 1)


BOTH, CPU, GPU = ("cpu", "cuda"), ("cpu",), ("cuda",)
TAKEN = [
    (BOTH, {"tensor_model_parallel_size": 2, "expert_parallel_size": 2}, {"tp_size": 2, "ep_size": 2, "dp_size": 1}),
    (BOTH, {"data_parallel_size": 2}, {"dp_size": 2, "tp_size": 1}),
    (BOTH, {"load_format": "safetensors"}, {"load_format": "safetensors"}),
    (BOTH, {"load_format": "dummy"}, {"load_format": "dummy"}),
    (BOTH, {"max_num_seqs": 5}, {"max_running_requests": 5}),
    (BOTH, {"max_num_batched_tokens": 30}, {"max_prefill_tokens": 30, "chunked_prefill_size": 30}),
    (BOTH, {"max_model_len": 50}, {"context_length": 50 + sglang_args.SPARE_TOKENS}),
    (BOTH, {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    (BOTH, {"dtype": "half"}, {"dtype": "float16"}),
    (BOTH, {"skip_tokenizer_init": False}, {"skip_tokenizer_init": False}),
    (BOTH, {"disable_log_stats": False}, {"log_level": "info"}),
    (BOTH, {"seed": 7}, {"random_seed": 7}),
    (BOTH, {}, {"sampling_backend": "pytorch", "log_level": "error", "disable_radix_cache": False}),
    (CPU, {"max_num_seqs": 5}, {"max_total_tokens": 5 * (22 + sglang_args.SPARE_TOKENS + 1)}),
    (CPU, {}, {"attention_backend": "torch_native", "device": "cpu", "disable_cuda_graph": True}),
    (CPU, {}, {"enable_memory_saver": None, "enable_deterministic_inference": None, "sleep_on_idle": True}),
    (GPU, {}, {"attention_backend": None, "device": None, "max_total_tokens": None, "disable_cuda_graph": False}),
    (GPU, {}, {"sleep_on_idle": None}),
    (GPU, {"gpu_memory_utilization": 0.4}, {"mem_fraction_static": 0.4}),
    (GPU, {"enforce_eager": True, "cudagraph_capture_sizes": [1]}, {"disable_cuda_graph": True, GRAPHS: None}),
    (GPU, {"cudagraph_capture_sizes": [1, 4]}, {GRAPHS: [1, 4]}),
    (GPU, {"free_cache_engine": False}, {"enable_memory_saver": False}),
    (GPU, {"batch_invariant": True}, {"enable_deterministic_inference": True, "enable_memory_saver": True}),
    *(
        (BOTH, {"engine_kwargs": {"sglang": {name: value}}}, {name: value})
        for name, value in (
            ("attention_backend", "triton"),
            ("port", 31000),
            ("max_total_tokens", 512),
            ("mem_fraction_static", 0.2),
            ("grammar_backend", "llguidance"),
            ("disable_radix_cache", None),
        )
    ),
]


@pytest.mark.parametrize(
    ("device", "changes", "expected"), [(device, *rest) for devices, *rest in TAKEN for device in devices]
)
def test_each_key_becomes_an_argument_of_sglang(
    model_config: Any, monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    """None: the argument is left to SGLang."""
    monkeypatch.setattr(sglang_args, "get_device_name", lambda: device)
    args = sglang_arguments(model_config, **changes)
    assert {name: args.get(name) for name in expected} == expected
    assert args.keys() <= known_arguments()


def test_only_an_engine_that_takes_turns_frees_its_memory(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_args, "get_device_name", lambda: "cuda")
    config = tiny.rollout_config("sglang")
    assert not sglang_args.build_engine_args(config, model_config)["enable_memory_saver"]
    assert sglang_args.build_engine_args(config, model_config, is_hybrid=True)["enable_memory_saver"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_kwargs": {"sglang": {"mem_fraction_statc": 1}}}, "mem_fraction_statc=1: is no argument of SGLang"),
        ({"expert_parallel_size": 2, "data_parallel_size": 2}, "expert_parallel_size=2: must be 1 or tensor"),
        (
            {"engine_kwargs": {"sglang": {"nccl_port": 29500}}, "data_parallel_size": 2},
            "nccl_port=29500: must be null with data_parallel_size=2: each group takes its own",
        ),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2: is not supported by sglang"),
        ({"repetition_penalty": 2.5}, "repetition_penalty=2.5: must be at most 2.0 with sglang"),
        *(
            ({"engine_kwargs": {"sglang": {name: value}}}, f"engine_kwargs.sglang.{name}={value}: {expected}")
            for name, value, expected in (
                ("nnodes", 2, "is not supported: an engine runs on one node; actor_rollout_ref.rollout.nnodes"),
                ("node_rank", 1, "is not supported: an engine runs on one node"),
                ("dist_init_addr", "host:1", "is not supported: an engine runs on one node"),
                ("tp_size", 2, "is decided by actor_rollout_ref.rollout.tensor_model_parallel_size"),
                ("dp_size", 2, "is decided by actor_rollout_ref.rollout.data_parallel_size"),
                ("pp_size", 2, "is not supported: use actor_rollout_ref.rollout.tensor_model_parallel_size"),
                ("context_length", 9, "is decided by actor_rollout_ref.rollout.max_model_len"),
                ("load_format", "auto", "is decided by actor_rollout_ref.rollout.load_format"),
                ("enable_lora", "x", "is not supported: adapters .* reach the engine merged into the weights"),
            )
        ),
    ],
)
def test_a_layout_or_an_argument_that_sglang_does_not_have(changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("sglang")
    with pytest.raises(ValueError, match=message):
        tiny.rollout_config("sglang", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 21}, r"max_model_len=21 is below .* 12 \+ 10 = 22"),
        ({"response_length": 60}, r"72 .* exceeds the model's max_position_embeddings=64"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 20}, "max_num_batched_tokens=20 is below"),
        ({"tensor_model_parallel_size": 2}, "needs a process group"),
        ({"data_parallel_size": 2}, "data_parallel_size=2: write 1"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"gpu_memory_utilization": 1e-9}, "key-value cache of one sequence"),
    ],
)
def test_sizes_that_cannot_work(model_config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_config, **changes)


def test_context_error_is_of_both_types(model_config: Any) -> None:
    with pytest.raises(AssertionError):
        build(model_config, max_model_len=21)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a check of the CPU engine")
def test_head_size_without_a_kernel(model_config: Any) -> None:
    model_config.hf_config.hidden_size, model_config.hf_config.head_dim = 96, 24
    with pytest.raises(ValueError, match="no kernel for head size 24"):
        build(model_config)


def test_cache_of_what_all_sequences_need(model_config: Any) -> None:
    # keys and values, 2 layers, 2 heads of 32 floats, one block of 32 tokens and one to spare, 32 sequences
    assert build(model_config)["kv_cache_memory_bytes"] == 2 * 2 * 2 * 32 * 4 * 64 * 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cache of the CPU engine")
def test_the_workers_of_a_node_share_its_memory(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    found = []
    for variables in ({"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "4"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found.append(build(model_config, max_num_seqs=1 << 14, gpu_memory_utilization=0.5)["kv_cache_memory_bytes"])
    assert found == [1 << 28, 1 << 27]


@pytest.mark.parametrize(("name", "mode"), [("hf", "async"), ("other", "sync")])
def test_unknown_rollouts(name: str, mode: str) -> None:
    with pytest.raises(ValueError, match=f"name='{name}' with mode='{mode}'"):
        get_rollout_class(name, mode)
    with pytest.raises(AssertionError):
        get_rollout_class(name, mode)


def test_rollout_that_waits_for_nobody() -> None:
    with pytest.raises(ValueError, match="load_format=dummy waits"):
        build_rollout(tiny.rollout_config("hf"), MODEL, engine=None)


def test_only_begin_leaves_sglang_starting(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    events: list[str] = []
    rollout_class: Any = get_rollout_class("sglang", "sync")
    monkeypatch.setattr(rollout_class, "_begin_server", lambda self, devices: events.append("begin"))
    monkeypatch.setattr(rollout_class, "wait_until_started", lambda self: events.append("wait"))
    config = tiny.rollout_config("sglang")
    rollout_class.begin(config, model_config)
    assert events == ["begin"]
    rollout_class(config, model_config)  # as code of users does
    assert events == ["begin", "begin", "wait"]
    build_rollout(config, model_config, engine=object())
    assert events == ["begin", "begin", "wait", "begin", "wait"]


def test_prompts_that_leave_no_room() -> None:
    """The second prompt is one token for an image before it is padded, and six with its image."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    check_prompt_lengths([[1, 2, 3], [9]], mask, 6)
    with pytest.raises(ValueError, match=r"prompts\[1\] has 6 tokens; the engine's context leaves 5"):
        check_prompt_lengths([[1, 2, 3], [9]], mask, 5)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 7 tokens"):
        check_prompt_lengths([[1] * 7, [9]], mask, 6)


def test_prompts_and_values() -> None:
    prompts = tiny.prompts_batch(3)
    rows = [list(row) for row in prompts.non_tensor_batch["raw_prompt_ids"]]
    assert prompt_token_ids(prompts) == rows
    del prompts.non_tensor_batch["raw_prompt_ids"]
    assert prompt_token_ids(prompts) == rows
    config = tiny.rollout_config("hf", top_k=4)
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    assert sampling_values(tiny.prompts_batch(1, do_sample=False), config) == greedy
    assert sampling_values(tiny.prompts_batch(1), config)["top_k"] == 4
    assert sampling_values(tiny.prompts_batch(1, validate=True), config)["top_k"] == -1
    assert eos_token_ids(None) == []
    assert eos_token_ids(3) == [3]
    assert eos_token_ids((3, 4)) == [3, 4]
    assert pad_rows([[1], [], [2, 3]], 2, 9, int).tolist() == [[1, 9], [9, 9], [2, 3]]


@pytest.mark.parametrize(
    ("device", "changes", "level"),
    [
        ("cuda", {"load_format": "dummy"}, 2),
        ("cuda", {"load_format": "auto"}, 1),
        ("cuda", {"load_format": "dummy", "layered_summon": True}, 1),
        ("npu", {"load_format": "dummy"}, 1),
    ],
)
def test_how_deep_an_engine_sleeps(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], level: int
) -> None:
    """Level 2 drops the weights, which the next sync brings; vLLM Ascend knows level 1 alone."""
    monkeypatch.setattr(vllm_rollout, "get_device_name", lambda: device)
    assert vllm_rollout.sleep_level(tiny.rollout_config("vllm", **changes)) == level
