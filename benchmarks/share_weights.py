"""Measure what one copy of the weights for trainer and vLLM saves on a CPU: memory, and CPU seconds of a sync.

Each line is one process that holds a trainer with AdamW, and an engine: its own memory (PSS) after the start and after
a step of the optimizer with its sync, and the CPU seconds of the first sync and of later ones. Processes with one and
with two copies take turns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from process_tree import ProcessTree

MIB = 1 << 20


def write_model(folder: Path, layers: int) -> float:
    """Write a Qwen2 and return its size in MiB of fp32; 12 layers have about 500."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2688,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters()) / MIB


def run_process(folder: Path, shares: bool, syncs: int) -> None:
    """Take a step and sync a few times, and print what that took."""
    import os

    import torch

    from verl.utils.memory_utils import return_freed_host_memory
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, RolloutConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout import build_rollout
    from verl.workers.sharding_manager import build_sharding_manager

    model = HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=True)
    engine: Any = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(strategy="fsdp2"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5),
        checkpoint_config=None,
    )
    engine.initialize()
    settings = RolloutConfig(
        name="vllm",
        prompt_length=32,
        response_length=16,
        dtype="float32",
        tensor_model_parallel_size=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.1,
        share_weights=shares,
    )
    manager = build_sharding_manager(engine, build_rollout(settings, model, engine))
    started = time.process_time()
    if shares:
        manager.share_weights()
    found: dict[str, Any] = {"link": time.process_time() - started, "cpu": []}
    tree = ProcessTree(os.getpid())

    def sync() -> None:
        started = time.process_time()
        with manager:
            pass
        found["cpu"].append(time.process_time() - started)

    def own_memory() -> float:
        return_freed_host_memory()
        return sum(size for name, size in tree.note_memory().items() if name not in ("files", "shared memory")) / MIB

    sync()
    found["start"] = own_memory()
    for _ in range(syncs):
        generator = torch.Generator().manual_seed(len(found["cpu"]))
        for parameter in engine.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        engine.optimizer_step()
        sync()
    found["trained"] = own_memory()
    found["bytes"] = manager.last_sync["bytes"]
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Measure both in turn, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--copies", type=int, choices=(1, 2), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copies:
        from verl.utils.distributed import leave_process

        run_process(options.folder, options.copies == 1, options.syncs)
        leave_process(0)
    with tempfile.TemporaryDirectory() as name:
        print(f"weights: {write_model(Path(name), options.layers):.0f} MiB")
        words = [sys.executable, __file__, "--folder", name, "--syncs", str(options.syncs)]
        for at in range(options.rounds):
            for copies in (2, 1):
                subprocess.run([*words, "--copies", str(copies)], check=True, stdout=sys.stderr)
                found = json.loads((Path(name) / "found.json").read_text(encoding="utf-8"))
                first, *later = found["cpu"]
                print(
                    f"round {at + 1}, copies {copies}: PSS {found['start']:.0f} MiB, {found['trained']:.0f} MiB after "
                    f"a step; CPU s: link {found['link']:.2f}, first sync {first:.2f}, later {median(later):.2f} "
                    f"(from {min(later):.2f} to {max(later):.2f}); {found['bytes'] / MIB:.0f} MiB moved",
                    flush=True,
                )


if __name__ == "__main__":
    main()
