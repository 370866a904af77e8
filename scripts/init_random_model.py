"""Write a model with random weights: the architecture and tokenizer of a given model, with other sizes.

    python scripts/init_random_model.py --hf_model_path Qwen/Qwen3-30B-A3B --new_config_path new.json --output_path OUT

``new.json`` holds the keys of ``config.json`` to change, such as ``{"num_hidden_layers": 2}``; a whole ``config.json``
or its folder also works. A nested mapping (``text_config``) changes only the keys that it holds.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.base_config import one_line
from verl.errors import WrongInput
from verl.utils.command_line import OneLineParser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hf_model_path", required=True, help="model folder or hub id that gives configuration and tokenizer")
    add("--new_config_path", required=True, help="JSON file with the keys to change, or a folder with a config.json")
    add("--output_path", required=True, help="output folder; it must not hold a model yet")
    add("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    add("--trust_remote_code", action="store_true", help="run code from the model's folder")
    return parser


def read_changes(path: str) -> dict[str, Any]:
    """Read the keys to change.

    Raises: WrongInput if the file cannot be read or does not hold a JSON object.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        changes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongInput(f"--new_config_path={path}: cannot be read: {one_line(str(error))}: write JSON") from error
    if not isinstance(changes, dict):
        raise WrongInput(f'--new_config_path={path}: must hold an object such as {{"num_hidden_layers": 2}}')
    return changes


def merged(config: Mapping[str, Any], changes: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return a configuration with changed keys.

    Raises: WrongInput for a key that the configuration does not have.
    """
    result = dict(config)
    if "num_hidden_layers" in changes:
        result.pop("layer_types", None)  # it has an entry per layer; transformers computes it again
    for name, value in changes.items():
        if name not in config:
            raise WrongInput(f"--new_config_path: the model has no key {at + name!r}, it has {sorted(config)}")
        inside = isinstance(value, dict) and isinstance(config[name], dict) and config[name]
        result[name] = merged(config[name], value, f"{at}{name}.") if inside else value
    return result


@contextmanager
def in_one_line(message: str) -> Iterator[None]:
    """Raise WrongInput if transformers cannot read or build a model within the block.

    Args: message: the text of the error, with ``{}`` in the place of the reason.
    """
    from huggingface_hub.errors import StrictDataclassError

    # A wrong value of the configuration fails where the model's code uses it, with an exception of any class.
    wrong_value = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError)
    try:
        yield
    except (OSError, ImportError, StrictDataclassError, *wrong_value) as error:
        raise WrongInput(message.format(one_line(f"{type(error).__name__}: {error}"))) from error


def init_random_model(args: argparse.Namespace) -> str:
    """Write the model and return a line that describes it.

    Raises: WrongInput for a model that cannot be read or built, or a folder that holds a model.
    """
    output = Path(args.output_path).expanduser()
    if (output / "config.json").exists():
        raise WrongInput(f"--output_path={output}: holds a model already: name another folder, or remove it")
    changes = read_changes(args.new_config_path)

    import torch
    from transformers import AutoConfig

    from verl.utils import hf_processor, hf_tokenizer
    from verl.utils.model import get_hf_auto_model_class

    source = os.path.expanduser(args.hf_model_path)
    trust = args.trust_remote_code
    with in_one_line(f"--hf_model_path={args.hf_model_path}: cannot be read: {{}}"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        tokenizer = hf_tokenizer(source, trust_remote_code=trust)
        processor = hf_processor(source, trust_remote_code=trust)
    fields = config.to_dict()
    fields.pop("transformers_version", None)
    changes.pop("transformers_version", None)
    fields = merged(fields, changes)
    no_model = f"--new_config_path={args.new_config_path}: gives no model: {{}}: change it"
    with in_one_line(no_model):
        config = type(config).from_dict(fields)
    rows = config.get_text_config().vocab_size
    if rows < len(tokenizer):
        raise WrongInput(f"--new_config_path: vocab_size={rows} is below the {len(tokenizer)} tokens of the tokenizer")
    torch.manual_seed(args.seed)
    with in_one_line(no_model):
        model = get_hf_auto_model_class(config).from_config(config, trust_remote_code=trust)
    model.save_pretrained(output)
    (processor or tokenizer).save_pretrained(output)
    return f"wrote a {config.model_type} model with {model.num_parameters():,} random parameters to {output}"


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit code: 2 for errors."""
    args = build_parser().parse_args(arguments)
    from verl.utils.observe.console import get_console

    try:
        get_console().info("%s", init_random_model(args))
    except (WrongInput, OSError) as error:
        sys.stderr.write(f"error: {one_line(str(error), 1000)}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
