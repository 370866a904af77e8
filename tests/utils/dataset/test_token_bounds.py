"""Which prompts need no tokenization: a bound that holds for every text, or none."""

import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import byte_tokenizer
from verl.utils import chat_template
from verl.utils.dataset import rl_dataset
from verl.utils.dataset.token_bounds import count_tokens, fewest_tokens, most_tokens
from verl.utils.process.time_limit import TimeLimitExceeded


def _with(pre_tokenizer: Any = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    if pre_tokenizer is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUT = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits(), BYTES])
BOUNDED = {"plain": _with(), "cut": _with(CUT), "nfc": _with(BYTES, normalizers.NFC())}


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="\u0958\u0959 \ufb2c\u1d160")  # NFC writes these as more characters
@example(text="<|end|> 12 <|end|>a")
def test_no_text_has_more_tokens_than_the_bound(name: str, text: str) -> None:
    bound = most_tokens(BOUNDED[name])
    assert bound is not None
    usual = len(BOUNDED[name](text, add_special_tokens=False)["input_ids"])
    assert usual <= bound(text)
    assert count_tokens(BOUNDED[name], [text, "ab"]) == [usual, 2]


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("\u1fef\u1100\u1161\u11a8e\u0301\u212a<|end|>"))
@example(text="\u1fef" * 40)  # NFC writes three bytes as one
@example(text="<|assistant|>" * 40)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    bound = fewest_tokens(BOUNDED[name])
    assert bound is not None
    assert bound(text) <= len(BOUNDED[name](text, add_special_tokens=False)["input_ids"])


def test_nfc_makes_a_third_of_a_text_at_most() -> None:
    for point in range(0x110000):
        written = chr(point)
        whole = unicodedata.normalize("NFC", written)
        if 0xD800 <= point < 0xE000 or whole == written:
            continue
        assert len(written.encode()) <= 3 * len(whole.encode())
        assert len(unicodedata.normalize("NFD", written).encode()) <= 3 * len(whole.encode())
    syllables = [chr(0xAC00 + at) for at in range(11_172)]
    assert all(len(unicodedata.normalize("NFD", each).encode()) <= 9 for each in syllables)


def test_some_tokenizers_have_no_lower_bound() -> None:
    swallows = _with()
    swallows.add_tokens([AddedToken("<|x|>", rstrip=True, normalized=False)])
    removes = _with(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES]))
    for tokenizer in (swallows, removes, _with(BYTES, normalizers.NFKC()), _with(BYTES, normalizers.Replace("a", ""))):
        assert fewest_tokens(tokenizer) is None
    longer = _with()
    longer.add_tokens(["a" * 1_000])
    assert fewest_tokens(longer)("a" * 2_000) == 2 == len(longer("a" * 2_000, add_special_tokens=False)["input_ids"])


class OwnCall(PreTrainedTokenizerFast):
    """A tokenizer with its own way to tokenize."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return {"input_ids": [[0, 1, 2] for _ in args[0]]}


def test_other_tokenizers_have_no_bound() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    own = OwnCall(tokenizer_object=byte_tokenizer().backend_tokenizer)
    others = [
        _with(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _with(pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), BYTES])),
        _with(BYTES, normalizers.NFKC()),
        _with(BYTES, normalizers.Prepend("_")),
        PreTrainedTokenizerFast(tokenizer_object=words),
        own,
    ]
    assert [most_tokens(tokenizer) for tokenizer in others] == [None] * len(others)
    assert count_tokens(own, ["a"]) == [3] and count_tokens(own, []) == []


def test_a_setting_of_an_earlier_call_does_not_count() -> None:
    tokenizer = byte_tokenizer()
    tokenizer(["abcdef", "a"], truncation=True, max_length=3, padding="max_length")
    assert count_tokens(tokenizer, ["abcdef", "a"]) == [6, 1]


@pytest.mark.parametrize("limit", [0, 7, 25, 60])
def test_the_filter_keeps_the_rows_that_counting_keeps(limit: int, parquet: Any, row: Any, tokenizer: Any) -> None:
    contents = ["x" * length for length in range(30)] + ["ä" * length for length in range(0, 30, 3)]
    path = parquet([row(content) for content in contents])
    options = {"max_prompt_length": 20 + limit, "filter_overlong_prompts": False}
    dataset = rl_dataset.RLHFDataset(path, tokenizer, options)
    exact = dataset.prompt_lengths(dataset.dataframe)
    bounded = dataset.prompt_lengths(dataset.dataframe, enough=20 + limit)
    assert ((exact <= 20 + limit) == (bounded <= 20 + limit)).all()
    assert (exact[bounded > 20 + limit] == bounded[bounded > 20 + limit]).all()


def test_chats_that_share_a_limit_are_rendered_one_by_one_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, parquet: Any, row: Any, tokenizer: Any
) -> None:
    dataset = rl_dataset.RLHFDataset(parquet([row("a"), row("bb")]), tokenizer, {"filter_overlong_prompts": False})
    want = dataset.prompt_lengths(dataset.dataframe).tolist()
    entered = []

    class Limit:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *error: object) -> None:
            if len(entered) == 1 and error[0] is None:
                raise TimeLimitExceeded

    monkeypatch.setattr(chat_template, "time_limit", lambda seconds: Limit())
    batch = {"prompt": dataset.dataframe[:]["prompt"]}
    assert rl_dataset._count_tokens(batch, dataset)["length"] == want
    assert len(entered) == 3  # one for both, then one for each
