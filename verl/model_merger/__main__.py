"""Merge a sharded checkpoint into a Hugging Face folder, or compare it with one.

``python -m verl.model_merger merge|test --backend fsdp --local_dir <run>/global_step_<N>/actor ...``
"""

import argparse
import sys
from dataclasses import fields

from verl.utils import envs
from verl.utils.command_line import OneLineParser
from verl.utils.observe.console import get_console

SHOWN_DIFFERENCES = 5


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of both subcommands."""
    parser = OneLineParser(prog="python -m verl.model_merger", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--backend", choices=("fsdp", "megatron"), required=True, help="engine that wrote the checkpoint")
    add("--local_dir", required=True, help="folder of one role: <run>/global_step_<N>/actor")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the result (default: the source model's)")
    add("--merge-lora", action="store_true", help="merge adapters into the weights instead of writing lora_adapter/")
    add("--tie-word-embedding", action="store_true", help="ignore tie_word_embeddings of config.json and tie")
    add("--trust-remote-code", action="store_true", help="run code from the model's folder")
    add("--is-value-model", action="store_true", help="fail unless the checkpoint has a value head")
    add("--use_cpu_initialization", action="store_true", help="accepted and ignored: merging never uses an accelerator")
    command = commands.add_parser("merge", parents=[shared], help="write a folder that from_pretrained loads")
    command.add_argument("--target_dir", default="tmp", help="folder to write (default: tmp)")
    command.add_argument("--hf_upload_path", help="hub id to upload the result to, such as name/model")
    command.add_argument("--private", action="store_true", help="make the hub repository private")
    command = commands.add_parser("test", parents=[shared], help="compare with a folder of Hugging Face weights")
    command.add_argument("--test_hf_dir", required=True, help="Hugging Face folder to compare with")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Merge or compare; return the exit code: 1 if weights differ, 2 for errors."""
    args = build_parser().parse_args(arguments)
    if envs.integer("RANK", 0) > 0:  # under torchrun the first process does all the work
        return 0
    # imported late, because it takes seconds and wrong arguments should fail at once
    from verl.model_merger.merger import MergeOptions, adapter_note, check_upload, compare, merge, upload

    options = MergeOptions(**{field.name: getattr(args, field.name) for field in fields(MergeOptions)})
    try:
        if args.command == "merge":
            if args.hf_upload_path:
                check_upload(args.hf_upload_path)
            folder = merge(options, args.target_dir)
            get_console().info("wrote %s%s", folder, adapter_note(folder))
            if args.hf_upload_path:
                get_console().info("uploaded to %s", upload(folder, args.hf_upload_path, args.private))
            return 0
        differences = compare(options, args.test_hf_dir)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if differences:
        shown = "\n  ".join(differences[:SHOWN_DIFFERENCES])
        get_console().info("%d tensors differ; the first:\n  %s", len(differences), shown)
        return 1
    get_console().info("all tensors equal those of %s", args.test_hf_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
