"""Merge a sharded checkpoint by the earlier command line, which calls ``python -m verl.model_merger``.

    python scripts/legacy_model_merger.py merge --backend fsdp --local_dir <run>/global_step_<N>/actor --target_dir OUT

It takes all arguments of that command. It also takes, and ignores, ``--hf_model_path`` of earlier versions, because a
checkpoint holds its configuration and tokenizer in ``huggingface/``.
"""

import argparse
import sys

from verl.model_merger.__main__ import main as merge


def main(arguments: list[str] | None = None) -> int:
    """Merge or compare; return the exit code: 1 if weights differ, 2 for errors."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or "-h" in given or "--help" in given:
        sys.stdout.write(f"{__doc__}\n")
    earlier = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    earlier.add_argument("--hf_model_path")
    ignored, kept = earlier.parse_known_args(given)
    if ignored.hf_model_path is not None:
        sys.stderr.write("--hf_model_path is ignored: the checkpoint holds its configuration in huggingface/\n")
    return merge(kept)


if __name__ == "__main__":
    sys.exit(main())
