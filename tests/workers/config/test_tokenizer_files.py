"""Tokenizer files with garbage in them, and tokenizers that do not fit their model, are named before anything loads."""

import json
import os

import pytest

from verl.workers.config.tokenizer_files import tokenizer_problems

VOCAB = {"a": 0, "b": 1, "<end>": 2}
GOOD = {
    "tokenizer.json": {
        "model": {"type": "BPE", "vocab": VOCAB},
        "added_tokens": [{"id": 7, "content": "<image>"}, {"id": 2, "content": "<end>"}],
    },
    "tokenizer_config.json": {"eos_token": "<end>", "pad_token": None},
}


def folder(at, files):
    for name, content in files.items():
        (at / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(at)


@pytest.mark.parametrize(
    ("changes", "hf_config", "message"),
    [
        ({}, {"vocab_size": 3}, None),
        ({}, {}, None),
        ({"tokenizer.json": [1, 2]}, None, "tokenizer.json holds a list, it must be an object"),
        ({"tokenizer.json": {"model": [], "added_tokens": [0]}}, {"vocab_size": 3}, "its 'model' must be an object"),
        ({"tokenizer.json": {"model": {}, "added_tokens": [0]}}, {"vocab_size": 3}, None),
        ({"tokenizer_config.json": {"model_max_length": "long"}}, None, 'has model_max_length="long"'),
        ({"generation_config.json": [1]}, {"vocab_size": 3}, "generation_config.json holds a list"),
        ({"generation_config.json": "{"}, {"vocab_size": 3}, None),
        ({"tokenizer.json": "[" * 100_000}, None, "tokenizer.json is not readable JSON"),
        ({"tokenizer_config.json": "null"}, None, "tokenizer_config.json holds a NoneType"),
        ({}, {"vocab_size": 2}, "tokenizer.json gives '<end>' the id 2, and config.json has vocab_size=2"),
        ({}, {"text_config": {"vocab_size": 1}}, "vocab_size=1"),
        ({"chat_template.jinja": "<image>{{ messages }}"}, {"vocab_size": 3}, "gives '<image>' the id 7"),
        (
            {"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}},
            {"vocab_size": 1},
            "gives 'the last token' the id 1",
        ),
        ({"tokenizer_config.json": {"eos_token": None}}, {"vocab_size": 3}, "has eos_token=null"),
        ({"tokenizer_config.json": {"eos_token": None}}, {"eos_token_id": 2}, "has eos_token=null"),
        ({"tokenizer_config.json": {"eos_token": None, "pad_token": "a"}}, {"eos_token_id": 2}, None),
        ({"tokenizer_config.json": {}}, {"vocab_size": 3}, None),  # the class of the tokenizer may have one
    ],
)
def test_problems_of_tokenizer_files(tmp_path, changes, hf_config, message):
    found = list(tokenizer_problems(folder(tmp_path, GOOD | changes), hf_config))
    assert (not found) if message is None else (len(found) == 1 and message in found[0])


def test_a_pipe_is_not_read(tmp_path):
    folder(tmp_path, GOOD)
    os.remove(tmp_path / "tokenizer_config.json")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    assert list(tokenizer_problems(str(tmp_path), {})) == [
        "tokenizer_config.json is not a regular file: copy the tokenizer again"
    ]
