"""Convert a Hugging Face model to a distributed Megatron-Core checkpoint, which any parallel layout can load.

    python scripts/converter_hf_to_mcore.py --hf_model_path MODEL --output_path FOLDER [--test]
    torchrun --nproc-per-node 4 scripts/converter_hf_to_mcore.py ...    for models too large for one process

Each process converts an equal share of the layers. To train from the checkpoint, set
``megatron.dist_checkpointing_path`` to FOLDER. To convert it back, run
``python -m verl.model_merger merge --backend megatron --local_dir FOLDER``.
"""

import argparse
import os
import sys

SHOWN_DIFFERENCES = 5


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hf_model_path", required=True, help="model folder with safetensors files, as save_pretrained writes it"
    )
    parser.add_argument("--output_path", required=True, help="output folder")
    parser.add_argument("--use_cpu_initialization", action="store_true", help="keep the model on the CPU")
    parser.add_argument("--test", action="store_true", help="read the result back and compare each tensor")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code from the model's folder")
    return parser


def convert(model_path: str, output_path: str, trust_remote_code: bool = False) -> None:
    """Convert a model, keeping its dtype; all processes must call this together.

    Raises: ValueError naming the wrong file, tensor or key.
    """
    import torch
    import torch.distributed as dist

    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
    from verl.workers.config import CheckpointConfig, HFModelConfig, McoreEngineConfig
    from verl.workers.config.model import tokenizer_problems
    from verl.workers.engine.megatron.build import ModelBuilder
    from verl.workers.engine.megatron.layout import make_layout

    has_tokenizer = not list(tokenizer_problems(model_path))
    model_config = HFModelConfig(path=model_path, trust_remote_code=trust_remote_code, load_tokenizer=has_tokenizer)
    source_dtype = model_config.hf_config.dtype
    engine_config = McoreEngineConfig(
        pipeline_model_parallel_size=dist.get_world_size() if dist.is_initialized() else 1,
        dtype="bf16" if source_dtype == torch.bfloat16 else "fp32",  # fp32 can represent each fp16 value exactly
        sequence_parallel=False,
        forward_only=True,
    )
    layout = make_layout(engine_config)
    builder = ModelBuilder(model_config, engine_config, layout, is_value_model=False, makes_head=False)
    chunks = builder.build()
    builder.load(chunks)
    MegatronCheckpointManager(
        chunks,
        model_config.hf_config,
        processing_class=model_config.get_processor(),
        checkpoint_config=CheckpointConfig(save_contents=["model"]),
        source_dtype=source_dtype,
        source_folder=model_config.local_path,
    ).save_checkpoint(output_path)


def run(args: argparse.Namespace) -> int:
    """Convert and test; return the exit code: 1 if a tensor differs, 2 for errors."""
    from verl.model_merger import MergeOptions, compare
    from verl.utils import envs
    from verl.utils.distributed import initialize_global_process_group
    from verl.utils.observe.console import get_console

    rank = initialize_global_process_group()[1] if envs.integer("WORLD_SIZE", 1) > 1 else 0
    try:
        convert(args.hf_model_path, args.output_path, args.trust_remote_code)
        if rank != 0:
            return 0
        get_console().info("wrote %s", args.output_path)
        options = MergeOptions("megatron", args.output_path, trust_remote_code=args.trust_remote_code)
        differences = compare(options, args.hf_model_path) if args.test else []
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if differences:
        shown = "\n  ".join(differences[:SHOWN_DIFFERENCES])
        get_console().info("%d tensors differ; the first:\n  %s", len(differences), shown)
        return 1
    if args.test:
        get_console().info("all tensors equal those of %s", args.hf_model_path)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line, alone or under torchrun."""
    args = build_parser().parse_args(arguments)
    if args.use_cpu_initialization:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch initialises CUDA
    return run(args)


if __name__ == "__main__":
    code = main()
    from verl.utils.distributed import leave_process

    leave_process(code)
