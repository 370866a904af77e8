"""vLLM, Megatron-Core, FSDP2 and transformers in one process, and weights that go from one to the next."""

import json
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import spawn_ranks
from tests.workers.rollout import tiny

for package in ("vllm", "megatron.core", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.slow, pytest.mark.full]


@contextmanager
def _cpu_as_device() -> Any:
    """Megatron-Core asks CUDA for the device of its buffers and the state of its dropout."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(CudaRNGStatesTracker, "fork", lambda self: nullcontext())
        yield


def _megatron_steps() -> float:
    """Train a GPT model of Megatron-Core for five steps on one sequence; returns by how much the loss fell."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=96,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=97, max_sequence_length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, positions = torch.arange(8).unsqueeze(0) + 3, torch.arange(8).unsqueeze(0)
    later = ~torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    losses = []
    with _cpu_as_device():
        for _ in range(5):
            loss = model(ids, positions, later, labels=ids + 1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[0] - losses[-1]


def _fsdp_engine(folder: Path) -> Any:
    """Build the training engine, wrapped by ``fully_shard`` although it is alone."""
    from tests.workers.engine import cases
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=cases.model_config(folder),
        engine_config=FSDPEngineConfig(strategy="fsdp2", offload_policy=True),
        optimizer_config=FSDPOptimizerConfig(lr=3e-2),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def _log_probs(engine: Any, output: Any, folder: Path) -> torch.Tensor:
    """Score the samples by plain transformers on the weights that the engine exports."""
    from transformers import Qwen2ForCausalLM

    plain = Qwen2ForCausalLM.from_pretrained(folder)
    plain.load_state_dict({name: tensor.cpu() for name, tensor in engine.named_weights()})
    return tiny.reference_log_probs(plain.eval(), output, tiny.TEMPERATURE)


def _run(rank: int, folder: Path) -> None:
    from verl.algos.aggregate import agg_sum
    from verl.workers.sharding_manager import build_sharding_manager

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    rollout = tiny.start_rollout("vllm", tiny.build_model(), folder / "config")
    model = tiny.build_model()
    tiny.disturb(model, 0.1, seed=5)  # not what vLLM has loaded
    model.save_pretrained(folder / "model")
    engine = _fsdp_engine(folder / "model")
    manager = build_sharding_manager(engine, rollout)
    fell = _megatron_steps()
    errors, samples = [], []

    def loss_fn(output: Any, rows: Any) -> Any:
        return [agg_sum(-output["log_probs"], rows.batch["response_mask"], "token-mean")], {}

    for _ in range(2):
        with manager:
            output = rollout.generate_sequences(tiny.prompts_batch(8, repeat=2))
        difference = output.batch["rollout_log_probs"] - _log_probs(engine, output, folder / "model")
        errors.append(difference.abs().max().item())
        samples.append(tiny.sampled_tokens(output))
        output.meta_info.update(micro_batch_size_per_gpu=8, temperature=tiny.TEMPERATURE)
        with engine.train_mode():
            engine.train_batch(output, loss_fn)
    result = {"fell": fell, "errors": errors, "moved": samples[0] != samples[1]}
    (folder / "result.json").write_text(json.dumps(result | {"bytes": manager.last_sync["bytes"]}))
    rollout.shutdown()


def test_everything_lives_in_one_process(tmp_path: Path) -> None:
    spawn_ranks(_run, (tmp_path,), nprocs=1)
    result = json.loads((tmp_path / "result.json").read_text())
    assert max(result["errors"]) < 1e-4
    assert result["moved"] and result["bytes"] > 0
    assert result["fell"] > 0.5
