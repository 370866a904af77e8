"""What is refused where trainer and engine shall hold one copy of the weights."""

import json
import re

import pytest

from tests.trainer.config.test_validation import ACTOR, MODEL, ROLLOUT, violations

KEY, FSDP, VLLM = f"{ROLLOUT}.share_weights", f"{ACTOR}.fsdp_config", f"{ROLLOUT}.engine_kwargs.vllm"
ALONE = {KEY: True, "trainer.n_gpus_per_node": 1, f"{ROLLOUT}.dtype": "float32"}
BF16 = {f"{FSDP}.model_dtype": "bf16", f"{ROLLOUT}.dtype": "bfloat16"}
ON_A_GPU = {"trainer.device": "cuda", f"{ROLLOUT}.free_cache_engine": False}
REDUCED = {f"{FSDP}.mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}


@pytest.fixture(scope="module")
def base(composed):
    return composed()


def found(base, changes):
    return violations(base, ALONE | changes, use_critic=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        BF16,
        BF16 | REDUCED,
        BF16 | ON_A_GPU,
        {f"{ROLLOUT}.mode": "async"},
        {f"{FSDP}.optimizer_offload": True, f"{VLLM}.quantization": None},
        {KEY: False, f"{ROLLOUT}.name": "hf", f"{MODEL}.lora_rank": 4, f"{MODEL}.target_modules": "all-linear"},
    ],
)
def test_a_run_that_shares_its_weights_is_right(base, changes):
    assert found(base, changes) == {}


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        (
            {f"{ROLLOUT}.name": "hf"},
            f"{ROLLOUT}.name",
            f"=hf: does not go with {KEY}=true, because hf cannot hold them: write vllm",
        ),
        ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name", f"write vllm, or write {KEY}=false"),
        (
            {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.n_gpus_per_node": 1},
            "actor_rollout_ref.hybrid_engine",
            "servers hold weights of their own: write true",
        ),
        ({"trainer.n_gpus_per_node": 2}, "trainer.n_gpus_per_node", "each of 2 workers would hold a part: write 1"),
        ({"trainer.nnodes": 2}, "trainer.nnodes", "each of 2 workers would hold a part: write 1"),
        (
            {"trainer.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "each worker's engine would hold a part: write 1",
        ),
        (
            {f"{MODEL}.lora_rank": 4, f"{MODEL}.target_modules": "all-linear"},
            f"{MODEL}.lora_rank",
            "=4: does not go with .*adapters are merged into a copy of the weights: write 0",
        ),
        (
            BF16 | {"trainer.device": "cuda"},
            f"{ROLLOUT}.free_cache_engine",
            "=true: .*vllm frees its weights with its cache: write false",
        ),
        ({f"{VLLM}.quantization": "fp8"}, f"{VLLM}.quantization", "weights would be others: leave it out, or write"),
        ({f"{VLLM}.cpu_offload_gb": 4}, f"{VLLM}.cpu_offload_gb", "weights would be others: leave it out, or write"),
        ({f"{FSDP}.param_offload": True}, f"{FSDP}.param_offload", "the weights would leave the engine: write false"),
        ({f"{FSDP}.offload_policy": True}, f"{FSDP}.offload_policy", "the weights would leave the engine: write"),
        (
            {f"{ROLLOUT}.dtype": "bfloat16"},
            f"{ROLLOUT}.dtype",
            rf"=bfloat16: .*the trainer holds float32 \({FSDP}\.model_dtype\): write float32",
        ),
        ({f"{ROLLOUT}.dtype": "auto"}, f"{ROLLOUT}.dtype", "=auto: .* write float32"),
        (
            REDUCED,
            f"{FSDP}.mixed_precision",
            "would compute with a bfloat16 copy of float32 weights: write param_dtype",
        ),
        (
            ON_A_GPU,
            f"{FSDP}.mixed_precision",
            "would compute with a bfloat16 copy of float32 weights: write param_dtype",
        ),
    ],
)
def test_what_has_another_copy_is_refused(base, changes, key, told):
    refused = found(base, changes)
    assert re.search(told, refused[key]), refused


def test_megatron_is_refused(composed):
    run = composed("trainer.n_gpus_per_node=1", name="ppo_megatron_trainer")
    refused = violations(run, {KEY: True}, use_critic=False)
    assert "because Megatron-Core has another layout: write fsdp or fsdp2" in refused[f"{ACTOR}.strategy"]


@pytest.mark.parametrize(
    ("field", "form"), [({"num_experts": 8}, "experts"), ({"kv_lora_rank": 64, "num_experts": 1}, "a latent cache")]
)
def test_weights_that_the_engine_holds_in_another_form_are_refused(base, tmp_path, field, form):
    sizes = {"max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **field}))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    refused = found(base, {f"{MODEL}.path": str(tmp_path)})
    assert refused[KEY].endswith(f"a model with {form}, which vllm holds in another form: write false")
