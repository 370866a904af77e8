"""Search: the wire contract, its retries, and the retrieval server with both indices."""

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.http_service import service
from verl.base_config import WrongInput
from verl.tools.calls import CallResult, execute_call
from verl.tools.retrieval_index import BM25Index, DenseIndex, Document, read_corpus
from verl.tools.search_tool import SearchTool
from verl.utils.http_client import post_json

CORPUS = [
    Document("0", "Paris\nParis is the capital of France"),
    Document("1", "Berlin\nBerlin is the capital of Germany, and the largest city of Germany"),
    Document("2", "Seine\nThe river Seine crosses Paris"),
    Document("3", "Bread\nFlour, water, salt"),
]


def search(url: str, parameters: Any, **config: Any) -> CallResult:
    tool = SearchTool({"type": "native", "retrieval_service_url": url, "retry_delay_s": 0.01, **config})
    return asyncio.run(execute_call(tool, "i", parameters))


def result_of(call: CallResult) -> str:
    found = json.loads(call.response.text or "")
    assert list(found) == ["result"]
    return str(found["result"])


# ---- the tool


def test_the_wire_contract() -> None:
    found = [[{"document": {"contents": "Title\nLine é\nmore"}, "score": 2.0}, {"contents": "Bare"}], []]
    with service(lambda request: (200, {"result": found})) as served:
        call = search(f"{served.url}/retrieve", {"query_list": ["a", "b"]}, topk=2)
    assert served.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]
    assert served.paths == ["/retrieve"]
    assert result_of(call) == "Doc 1 (Title: Title)\nLine é\nmore\n\nDoc 2 (Title: Bare)\n\n\n---\n"
    assert "é" in (call.response.text or "")
    counts = {"query_count": 2, "total_results": 2, "api_request_error": None, "status": "success"}
    assert (call.outcome, call.reward, call.metrics) == ("ok", 0.0, counts)


def test_nothing_found() -> None:
    with service(lambda request: (200, {"result": [[]]})) as served:
        call = search(served.url, {"query_list": "a"})
    assert result_of(call) == "No search results found."
    assert (call.outcome, call.metrics["status"]) == ("ok", "no_results")


@pytest.mark.parametrize("parameters", [{}, {"query_list": []}, {"query_list": [3]}, {"query": "a"}])
def test_wrong_arguments(parameters: dict[str, Any]) -> None:
    call = search("http://127.0.0.1:9", parameters)
    assert call.outcome == "bad_arguments" and "query_list must be a list" in (call.response.text or "")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_service_that_recovers_is_asked_again(status: int) -> None:
    statuses = [status, status, 200]
    with service(lambda request: (statuses.pop(0), {"result": [[{"contents": "T\nx"}]]})) as served:
        call = search(served.url, {"query_list": ["a"]})
    assert call.outcome == "ok" and len(served.requests) == 3


@pytest.mark.parametrize(
    ("answer", "requests", "outcome", "text"),
    [
        ((503, {}), 3, "error", "HTTP status 503 in attempt 3"),
        ((404, {}), 1, "error", "HTTP status 404 in attempt 1"),
        ((200, {"result": []}), 1, "error", "no list of documents for each query"),
        ((200, {}), 1, "error", "no list of documents for each query"),
        (None, 2, "timeout", "no complete reply within 0.5 s in attempt 2"),
    ],
)
def test_failures_are_told(answer: tuple[int, Any] | None, requests: int, outcome: str, text: str) -> None:
    go_on = threading.Event()

    def reply(request: dict[str, Any]) -> tuple[int, Any]:
        return answer or (200, go_on.wait())

    with service(reply) as served:
        attempts = {"timeout": 0.5, "max_attempts": 2} if answer is None else {"max_attempts": 3}
        call = search(served.url, {"query_list": ["a"]}, **attempts)
        go_on.set()
    assert result_of(call).startswith("Search error: ") and text in result_of(call)
    assert (call.outcome, call.metrics["status"]) == (outcome, "api_error")
    assert text in call.metrics["api_request_error"]
    assert len(served.requests) == requests


def test_a_service_that_is_gone() -> None:
    with service(lambda request: (200, {})) as served:
        pass
    call = search(served.url, {"query_list": ["a"]}, max_attempts=2)
    assert call.outcome == "error" and "in attempt 2" in result_of(call)


def test_no_more_requests_at_once_than_allowed() -> None:
    now: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def reply(request: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            now.append(1)
            most.append(len(now))
        threading.Event().wait(0.05)
        with lock:
            now.pop()
        return 200, {"result": [[]]}

    async def run(url: str) -> None:
        tool = SearchTool({"retrieval_service_url": url, "num_workers": 8, "rate_limit": 3})
        calls = (execute_call(tool, str(number), {"query_list": ["a"]}) for number in range(12))
        assert {call.outcome for call in await asyncio.gather(*calls)} == {"ok"}

    with service(reply) as served:
        asyncio.run(run(served.url))
    assert max(most) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.retrieval_service_url=null: write the address"),
        ({"retrieval_service_url": "http://x", "top_k": 3}, "config.top_k=3: there is no such key; the nearest.*topk"),
        ({"retrieval_service_url": "http://x", "topk": 0}, "config.topk=0"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        SearchTool(config)


# ---- indices


def test_bm25_scores_equal_the_formula() -> None:
    """Lucene's BM25 by hand, over lower-case words of two letters or more without English stop words."""
    words = [
        ["paris", "paris", "capital", "france"],
        ["berlin", "berlin", "capital", "germany", "largest", "city", "germany"],
        ["seine", "river", "seine", "crosses", "paris"],
        ["bread", "flour", "water", "salt"],
    ]
    average = sum(map(len, words)) / len(words)

    def score(query: list[str], document: list[str]) -> float:
        total = 0.0
        for word in query:
            having = sum(word in each for each in words)
            idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            count = document.count(word)
            total += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / average))
        return total

    found = BM25Index(CORPUS).search(["the capital of Germany", "Paris", "unknown words", ""], 3)
    for query, hits in zip((["capital", "germany"], ["paris"]), found, strict=False):
        wanted = sorted(((score(query, document), place) for place, document in enumerate(words)), reverse=True)
        assert [hit.place for hit in hits] == [place for value, place in wanted if value > 0][:3]
        assert [hit.score for hit in hits] == pytest.approx([value for value, _ in wanted if value > 0][:3], rel=1e-5)
    assert found[2:] == [[], []]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny encoder with random weights, whose name has the prefixes of E5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("models") / "tiny-e5")
    texts = " ".join(document.contents for document in CORPUS).lower() + " query passage :"
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *sorted(set(texts.split()))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    import torch

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder)
    return folder


def test_dense_scores_equal_the_cosine_of_single_passes(encoder: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)

    def embed(text: str) -> Any:
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
        return mean / mean.norm()

    query = "capital of france"
    wanted = [float(embed(f"query: {query}") @ embed(f"passage: {each.contents}")) for each in CORPUS]
    cache = str(tmp_path / "embeddings.npy")
    for _ in range(2):  # the second time from the cache
        hits = DenseIndex(CORPUS, encoder, cache=cache).search([query, query], 3)
        assert hits[0] == hits[1]
        assert [hit.place for hit in hits[0]] == sorted(range(4), key=lambda place: -wanted[place])[:3]
        # fp32 sums in another order, over padded batches
        assert [hit.score for hit in hits[0]] == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-5)
    assert np.load(cache).shape == (4, 16)
    with pytest.raises(WrongInput, match="holds embeddings of another corpus or model"):
        DenseIndex(CORPUS[1:], encoder, cache=cache)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "holds no documents"),
        ("a.jsonl", '{"id": 1}\n', "row 1: has no contents"),
        ("a.jsonl", '{"contents": "x"}\n[1]\n', "row 2: is no JSON object"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.parquet", "x", "cannot be read"),
    ],
)
def test_a_wrong_corpus_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WrongInput, match=message):
        read_corpus(str(path))
    with pytest.raises(WrongInput, match="missing.jsonl: cannot be read"):
        read_corpus(str(tmp_path / "missing.jsonl"))


def test_parquet_is_a_corpus(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"title": ["A", "B"], "text": ["a", "b"]}).to_parquet(tmp_path / "c.parquet")
    assert read_corpus(str(tmp_path / "c.parquet")) == [Document("0", "A\na"), Document("1", "B\nb")]


# ---- the server, as a process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the corpus by words."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(document._asdict()) for document in CORPUS))
    command = [sys.executable, "-m", "verl.tools.retrieval_server", "--corpus", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving 4 documents at http://127.0.0.1:")
        yield line.split()[-1]
        process.terminate()


def test_the_tool_searches_through_the_server(server: str) -> None:
    call = search(server, {"query_list": ["capital of Germany", "nothing here"]}, topk=1)
    title = "Doc 1 (Title: Berlin)\nBerlin is the capital of Germany, and the largest city of Germany\n"
    assert result_of(call) == f"{title}\n---\n"
    assert call.metrics["total_results"] == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"queries": "a"}, "queries must be a list of texts"),
        ({"queries": ["a"] * 1025}, "at most 1024 texts"),
        ({"queries": ["a"], "topk": 0.5}, "topk must be an integer"),
    ],
)
def test_the_server_says_what_is_wrong(server: str, request_: dict[str, Any], message: str) -> None:
    reply = asyncio.run(post_json(server, request_, 10.0))
    assert reply.status == 400 and message in json.loads(reply.text)["error"]


def test_the_server_without_scores(server: str) -> None:
    reply = asyncio.run(post_json(server, {"queries": ["Seine"], "topk": 1}, 10.0))
    assert json.loads(reply.text) == {"result": [[CORPUS[2]._asdict()]]}


def test_the_command_refuses_a_wrong_corpus(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.tools.retrieval_server", "--corpus", str(tmp_path / "none.jsonl")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "none.jsonl: cannot be read" in found.stderr


def test_the_example_shows_what_the_tool_answers() -> None:
    """Supervised rows of the example with lockers have the answers of the real index and the real tool."""
    from examples.sglang_multiturn.search_r1_like.lockers import make_task

    corpus, rows = make_task.tables(0)
    documents = [Document(**each) for each in corpus]
    index = BM25Index(documents)

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        found = index.search(request["queries"], request["topk"])
        return 200, {"result": [[documents[hit.place]._asdict() for hit in hits] for hits in found]}

    called = next(row["messages"] for row in rows["sft_train"] if len(row["messages"]) == 4)
    query = called[1]["content"].removeprefix(make_task.HEAD).removesuffix(make_task.TAIL)
    with service(answer) as served:
        call = search(f"{served.url}/retrieve", {"query_list": [query]}, topk=1)
    assert call.response.text == called[2]["content"]
