"""The files of a tokenizer in a local folder, checked without transformers, which may take any of them for empty."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOKENIZER_PREFIXES = ("tokenizer", "tokenization_", "vocab", "tekken", "merges", "spm", "spiece")
TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".bpe")
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_OBJECTS = ("tokenizer.json", _GENERATION, *_SETTINGS)

Files = dict[str, dict[str, Any]]
"""JSON files of a folder by name."""


def tokenizer_problems(path: str, hf_config: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield why a local folder holds no usable tokenizer.

    Args: ``hf_config`` is the config.json of the model that reads its tokens, if it does.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return
    found = sorted(file for file in folder.iterdir() if file.name.startswith(TOKENIZER_PREFIXES))
    if not found and not any(file.name.endswith(TOKENIZER_SUFFIXES) for file in folder.iterdir()):
        yield "the folder holds no tokenizer: save the tokenizer next to the model, or name another tokenizer_path"
        return
    files: Files = {}
    names = {file.name for file in found if not file.is_dir()} | {
        name for name in _SETTINGS if (folder / name).exists()
    }
    problems = [(name, _read(folder / name, files)) for name in sorted(names)]
    yield from (f"{name} {problem}: copy the tokenizer again" for name, problem in problems if problem is not None)
    if hf_config is not None and all(problem is None for _, problem in problems):
        problem = _read(folder / _GENERATION, files)
        if problem is not None and problem.startswith("holds"):  # other broken ones count as none, as for transformers
            yield f"{_GENERATION} {problem}: copy the model again"
        yield from _token_problems(files, hf_config, folder)


def _read(file: Path, files: Files) -> str | None:
    """Read a JSON object into ``files``; return why that fails."""
    if not file.is_file():
        return "is not a regular file"
    if file.suffix != ".json":
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        return f"is not readable JSON ({error})"
    if not isinstance(content, dict):
        return f"holds a {type(content).__name__}, it must be an object" if file.name in _OBJECTS else None
    files[file.name] = content
    if file.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
        return "holds no tokenizer, its 'model' must be an object"
    longest = content.get("model_max_length")
    if file.name == "tokenizer_config.json" and not isinstance(longest, int | float | None):
        return f"has model_max_length={json.dumps(longest)}, it must be a number"
    return None


def _token_problems(files: Files, hf_config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield a tokenizer that names no end-of-sequence token, and tokens that the model has no embedding for."""
    settings = files.get("tokenizer_config.json", {})
    texts = {name: _text(settings.get(name) or files.get("special_tokens_map.json", {}).get(name)) for name in _TOKENS}
    ends = [fields.get("eos_token_id") for fields in (files.get("generation_config.json", {}), hf_config)]
    # A file that leaves the token out gets that of its class; null means that there is none.
    has_none = "eos_token" in settings and texts["eos_token"] is None
    if has_none and (texts["pad_token"] is None or not any(end is not None for end in ends)):
        yield (
            "tokenizer_config.json has eos_token=null: name the token that ends a response, and that pads if pad_token "
            "is null too"
        )
    size = (hf_config.get("text_config") or hf_config).get("vocab_size")
    tokenizer = files.get("tokenizer.json")
    if tokenizer is None or not isinstance(size, int):
        return
    shown = _chat_template(settings, folder) + " ".join(text for text in texts.values() if text is not None)
    token, number = max(_tokens(tokenizer, shown), key=lambda each: each[1], default=("", -1))
    if number >= size:
        yield (
            f"tokenizer.json gives {token!r} the id {number}, and config.json has vocab_size={size}: name the "
            "tokenizer of this model, or a model whose embedding has a row for each token"
        )


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(settings: Mapping[str, Any], folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return str(settings.get("chat_template") or "")


def _tokens(tokenizer: Mapping[str, Any], shown: str) -> Iterator[tuple[str, int]]:
    """Yield the tokens of the vocabulary, and those of the added ones that are in the text ``shown``, with their ids.

    Some models ship added tokens that they have no embedding for and that no text holds.
    """
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of a unigram model: pairs of token and score
        yield "the last token", len(vocab) - 1
    elif isinstance(vocab, dict):
        yield from ((token, number) for token, number in vocab.items() if isinstance(number, int))
    for added in tokenizer.get("added_tokens") or ():
        if isinstance(added, dict) and isinstance(added.get("id"), int) and str(added.get("content")) in shown:
            yield str(added["content"]), added["id"]
