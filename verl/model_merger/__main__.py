"""``python -m verl.model_merger merge|test --backend fsdp --local_dir <run>/global_step_<N>/actor ...``."""

import argparse
import sys

from verl.utils import envs
from verl.utils.observe.console import get_console

BACKENDS = ("fsdp", "megatron")
SHOWN_DIFFERENCES = 5


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of both subcommands."""
    parser = argparse.ArgumentParser(prog="python -m verl.model_merger", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--backend", choices=BACKENDS, required=True, help="what wrote the checkpoint")
    add("--local_dir", required=True, help="folder of one role: <run>/global_step_<N>/actor")
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="of the result (default: that of the source model)",
    )
    add("--merge-lora", action="store_true", help="add adapters into the weights instead of writing lora_adapter/")
    add("--tie-word-embedding", action="store_true", help="input and output embeddings are one, whatever config says")
    add("--trust-remote-code", action="store_true", help="run the code of the model's folder")
    add("--is-value-model", action="store_true", help="insist that this is a critic, which is seen by its head")
    add("--use_cpu_initialization", action="store_true", help="accepted: weights are never on an accelerator here")
    command = commands.add_parser("merge", parents=[shared], help="write a folder that from_pretrained reads")
    command.add_argument("--target_dir", default="tmp", help="folder to write (default: tmp)")
    command.add_argument("--hf_upload_path", help="hub id to upload the result to, such as name/model")
    command.add_argument("--private", action="store_true", help="make that repository private")
    command = commands.add_parser("test", parents=[shared], help="compare with a folder of Hugging Face weights")
    command.add_argument("--test_hf_dir", required=True, help="the folder to compare with")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Merge or compare; returns the exit code: 1 when weights differ, 2 when something is wrong."""
    args = build_parser().parse_args(arguments)
    if envs.integer("RANK", 0) > 0:  # of torchrun, under which the first process does it all
        return 0
    # imports take seconds: only when the arguments are right
    from verl.model_merger.merger import MergeOptions, adapter_note, compare, merge, upload

    options = MergeOptions(
        args.backend, args.local_dir, args.dtype, args.merge_lora, args.is_value_model, args.tie_word_embedding,
        args.trust_remote_code,
    )  # fmt: skip
    try:
        if args.command == "merge":
            folder = merge(options, args.target_dir)
            get_console().info("wrote %s%s", folder, adapter_note(folder))
            if args.hf_upload_path:
                get_console().info("uploaded to %s", upload(folder, args.hf_upload_path, args.private))
            return 0
        differences = compare(options, args.test_hf_dir)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    if differences:
        shown = "\n  ".join(differences[:SHOWN_DIFFERENCES])
        get_console().info("%d tensors differ; the first:\n  %s", len(differences), shown)
        return 1
    get_console().info("all tensors are those of %s", args.test_hf_dir)
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
