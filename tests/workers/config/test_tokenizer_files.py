"""Tokenizer files with garbage in them, and tokenizers that do not fit their model, are named before anything loads."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl.workers.config.tokenizer_files import tokenizer_problems, vocabulary_difference, vocabulary_of

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


def saved(folder, kind, ids):
    """Write a vocabulary, whose last token is an added one, in one of the formats."""
    *plain, last = sorted(ids, key=ids.get)
    vocab = {token: ids[token] for token in plain}
    folder.mkdir(exist_ok=True)
    if kind == "bpe":
        content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"id": ids[last], "content": last}]}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif kind == "unigram":
        content = {"model": {"vocab": [[token, 0.0] for token in plain]}}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        decoder = {str(ids[last]): {"content": last}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    elif kind == "slow":
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "added_tokens.json").write_text(json.dumps({last: ids[last]}))
    else:
        (folder / "vocab.txt").write_text("\n".join([*plain, last]))
    return str(folder)


KINDS = ["bpe", "unigram", "slow", "lines"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(order=st.permutations("abcdef"), more=st.integers(0, 2), fewer=st.integers(0, 2))
def test_every_token_needs_its_id(tmp_path_factory, kind, other, order, more, fewer):
    root = tmp_path_factory.mktemp("vocabularies")
    ids = {token: number for number, token in enumerate("abcdef")}
    others = {token: number for number, token in enumerate((*order[: 6 - fewer], *"gh"[:more]))}
    paths = saved(root / "one", kind, ids), saved(root / "two", other, others)
    wrong = [token for token, number in ids.items() if others.get(token) != number]
    moved = [token for token in wrong if token in others]
    for found, expected in (
        (vocabulary_difference(*paths), wrong),
        (vocabulary_difference(*paths, may_lack=True), moved),
    ):
        assert (found is None) == (not expected)
        if expected:
            assert found.startswith(f"the token {expected[0]!r} has the id {ids[expected[0]]} in {paths[0]}")
            assert found.endswith(paths[1])


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel", "WordPiece"])
def test_a_vocabulary_is_that_which_transformers_loads(tmp_path, kind):
    tokens = {"<unk>": 0, "a": 1, "b": 2}
    model = {
        "BPE": lambda: models.BPE(vocab=tokens, merges=[], unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(token, 0.0) for token in tokens], 0),
        "WordLevel": lambda: models.WordLevel(vocab=tokens, unk_token="<unk>"),
        "WordPiece": lambda: models.WordPiece(vocab=tokens, unk_token="<unk>"),
    }[kind]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<end>")
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert len(expected) == 5 and vocabulary_of(tmp_path) == expected


@pytest.mark.parametrize("broken", ["{", "[]", '{"model": {"vocab": 3}, "added_tokens": [0, {"id": "x"}]}'])
def test_what_cannot_be_read_forbids_nothing(tmp_path, broken):
    path = saved(tmp_path / "one", "bpe", {"a": 0, "b": 1})
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "tokenizer.json").write_text(broken)
    for other in (str(tmp_path / "two"), str(tmp_path), "/nowhere", "org/model", "hdfs://host/model", ""):
        assert vocabulary_difference(path, other) is None and vocabulary_difference(other, path) is None
