"""Checks of a tokenizer's files in a local folder, without transformers, which may take damaged files for empty."""

import filecmp
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verl.utils.hub import cached_folder
from verl.utils.json_types import Json, mapping_at

TOKENIZER_PREFIXES = ("tokenizer", "tokenization_", "vocab", "tekken", "merges", "spm", "spiece")
TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".bpe")
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_GENERATION = "generation_config.json"
_OBJECTS = ("tokenizer.json", _GENERATION, *_SETTINGS)

Files = dict[str, dict[str, Json]]
"""JSON files of a folder by name."""


def tokenizer_problems(path: str, hf_config: Mapping[str, Json] | None = None) -> Iterator[str]:
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
        # Transformers ignores a file that is broken in another way.
        if problem is not None and problem.startswith("holds"):
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


def _token_problems(files: Files, hf_config: Mapping[str, Json], folder: Path) -> Iterator[str]:
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
    size = (mapping_at(hf_config, "text_config") or hf_config).get("vocab_size")
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


def _text(token: Json) -> str | None:
    """Return the text of a special token, which is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(settings: Mapping[str, Json], folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return str(settings.get("chat_template") or "")


def _items(value: Json) -> Sequence[Json]:
    return value if isinstance(value, list) else ()


def _tokens(tokenizer: Mapping[str, Json], shown: str) -> Iterator[tuple[str, int]]:
    """Yield the tokens of the vocabulary, and the added tokens that the text ``shown`` contains, with their ids.

    Some models ship added tokens that they have no embedding for and that no text holds.
    """
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # a unigram model has pairs of token and score
        yield "the last token", len(vocab) - 1
    elif isinstance(vocab, dict):
        yield from ((token, number) for token, number in vocab.items() if isinstance(number, int))
    for added in _items(tokenizer.get("added_tokens")):
        if isinstance(added, dict) and isinstance(added.get("id"), int) and str(added.get("content")) in shown:
            yield str(added["content"]), added["id"]


# ---- one vocabulary for several models

_VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json", "vocab.txt", "tokenizer_config.json")


def vocabulary_difference(tokenizer: str, other: str, may_lack: bool = False) -> str | None:
    """Describe a token of one tokenizer that another one lacks or gives another id; None if there is none.

    The other one may have more tokens. None too where a vocabulary cannot be read from files of this machine.

    Args: both are folders or hub ids; with ``may_lack`` only tokens that both have are compared.
    """
    folders = [cached_folder(path) for path in (tokenizer, other)]
    if folders[0] is None or folders[1] is None or folders[0] == folders[1]:
        return None
    first = Path(folders[0])
    second = Path(folders[1])
    if all((folder / _VOCABULARY[0]).is_file() for folder in (first, second)):
        if filecmp.cmp(first / _VOCABULARY[0], second / _VOCABULARY[0], shallow=False):
            return None
    ids = vocabulary_of(first)
    others = vocabulary_of(second)
    if not ids or not others:
        return None
    differing = [token for token, number in ids.items() if others.get(token, number if may_lack else None) != number]
    if not differing:
        return None
    token = min(differing, key=lambda each: ids[each])
    there = f"the id {others[token]}" if token in others else "none"
    return f"the token {token!r} has the id {ids[token]} in {tokenizer} and {there} in {other}"


def vocabulary_of(folder: Path) -> dict[str, int]:
    """Return the id of each token from a tokenizer's files; empty if they are of another kind, or cannot be read.

    Source: the formats of the packages tokenizers (tokenizer.json) and transformers (the others).
    """
    files: Files = {}
    present = [name for name in _VOCABULARY if (folder / name).is_file()]
    if any(_read(folder / name, files) is not None for name in present):
        return {}
    if "tokenizer.json" in files:
        tokenizer = files["tokenizer.json"]
        ids = _ids(mapping_at(tokenizer, "model").get("vocab")) | _ids_of_added(tokenizer.get("added_tokens"))
    elif "vocab.json" in files:
        ids = _ids(files["vocab.json"]) | _ids(files.get("added_tokens.json"))
    elif "vocab.txt" in present:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        ids = {token: number for number, token in enumerate(lines)}
    else:
        return {}
    decoder = files.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    later = [{**each, "id": int(n)} for n, each in entries if isinstance(each, dict) and str(n).isdecimal()]
    return _ids_of_added(later) | ids  # ids of the other files have precedence


def _ids(vocab: Json) -> dict[str, int]:
    """Return the tokens of a mapping of ids, or of a list of tokens with scores."""
    if isinstance(vocab, list):
        return {str(each[0]): number for number, each in enumerate(vocab) if isinstance(each, list) and each}
    entries = vocab.items() if isinstance(vocab, dict) else ()
    return {token: number for token, number in entries if isinstance(number, int)}


def _ids_of_added(added: Json) -> dict[str, int]:
    entries = [each for each in _items(added) if isinstance(each, dict) and isinstance(each.get("id"), int)]
    return {str(each["content"]): each["id"] for each in entries if "content" in each}
