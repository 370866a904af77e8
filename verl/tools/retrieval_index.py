"""Indices of a corpus: by words (BM25) and by the embeddings of a model."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from verl.base_config import one_line
from verl.errors import WrongInput
from verl.utils.import_utils import has_module
from verl.utils.json_types import JsonObject
from verl.utils.parsing import parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH = 64
MOST_TOKENS = 256
"""Tokens of a text that are embedded."""


class Document(NamedTuple):
    """A text of the corpus; the first line of its contents is its title."""

    id: str
    contents: str


class Hit(NamedTuple):
    """The place of a document in the corpus, and its score."""

    place: int
    score: float


class Index(Protocol):
    """Finds documents."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most ``topk`` hits for each query, the best first."""


def read_corpus(path: str) -> list[Document]:
    """Read JSON lines or parquet with ``contents``, or ``title`` and ``text``, and optionally ``id``.

    Raises: WrongInput naming the file and the line.
    """
    documents: list[Document] = []
    for number, row in _rows(path):
        contents = row.get("contents")
        if contents is None and row.get("text") is not None:
            contents = f"{row.get('title') or ''}\n{row['text']}"
        if not isinstance(contents, str):
            raise WrongInput(f"{path}, row {number}: has no contents: write a text there, or title and text")
        documents.append(Document(str(row.get("id", len(documents))), contents))
    if not documents:
        raise WrongInput(f"{path}: holds no documents: write one JSON object to a line, with id and contents")
    return documents


def _rows(path: str) -> Iterator[tuple[int, JsonObject]]:
    path = os.path.expanduser(path)
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                yield from enumerate(batch.to_pylist(), start=1)
            return
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = parse_json(line)
                    if not isinstance(row, dict):
                        raise WrongInput(f"{path}, row {number}: is no JSON object: write one to a line")
                    yield number, row
    except WrongInput:
        raise
    except (OSError, ValueError) as error:
        raise WrongInput(
            f"{path}: cannot be read: {one_line(str(error))}: give a file of JSON lines, or .parquet"
        ) from error


class BM25Index:
    """Finds documents by their words (Lucene's variant of BM25, k1 = 1.5, b = 0.75).

    Raises: WrongInput without the package bm25s.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        if not has_module("bm25s"):
            raise WrongInput("--index bm25 needs bm25s, which is not installed: pip install 'verl[tools]'")
        import bm25s

        self._count = len(documents)
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        texts = [document.contents for document in documents]
        self._index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the documents that share words with each query."""
        import bm25s

        tokens = bm25s.tokenize(list(queries), stopwords="en", return_ids=False, show_progress=False)
        places, scores = self._index.retrieve(tokens, k=min(topk, self._count), show_progress=False)
        return [
            [Hit(int(place), float(score)) for place, score in zip(*each, strict=True) if score > 0]
            for each in zip(places, scores, strict=True)
        ]


class DenseIndex:
    """Finds documents by the cosine of embeddings, the means of a model's last hidden states.

    Args:
        model: folder or name of an encoder of transformers, such as ``intfloat/e5-base-v2``.
        cache: file that keeps the embeddings of the corpus; it is written if it is missing.
        query_prefix, passage_prefix: prefixes of the texts; for models named E5 the defaults are E5's prefixes.

    Raises: WrongInput if the cache is of another corpus or model.

    Source: E5 (arXiv:2212.03533), section 3.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        model: str,
        device: str = "cpu",
        cache: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        is_e5 = "e5" in Path(model).name.lower()
        self.query_prefix = query_prefix if query_prefix is not None else "query: " * is_e5
        self.passage_prefix = passage_prefix if passage_prefix is not None else "passage: " * is_e5
        self.device = device
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        loaded, report = AutoModel.from_pretrained(model, trust_remote_code=False, output_loading_info=True)
        if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
            raise ValueError(f"{model}: its files lack {missing[0]!r}: name a folder that holds the whole model")
        self._model = loaded.eval().to(device)
        texts = [self.passage_prefix + document.contents for document in documents]
        self._embeddings = self._kept(texts, model, cache) if cache else self.embed(texts)  # (N, D)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the documents whose embeddings are nearest to that of each query."""
        if not queries:
            return []
        scores = self.embed([self.query_prefix + query for query in queries]) @ self._embeddings.T  # (Q, N)
        count = min(topk, scores.shape[1])
        best = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        return [
            [Hit(int(place), float(row[place])) for place in sorted(places, key=lambda p: (-row[p], p))]
            for row, places in zip(scores, best, strict=True)
        ]

    def embed(self, texts: Sequence[str]) -> "NDArray[np.float32]":
        """Return the embeddings of texts, (N, D), each of length 1."""
        import torch

        parts = []
        # texts of similar length share a batch, so that little of it is padding
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                batch = [texts[place] for place in order[start : start + BATCH]]
                inputs = self._tokenizer(
                    batch, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
                ).to(self.device)
                hidden = self._model(**inputs).last_hidden_state.float()  # (B, T, D)
                mask = inputs["attention_mask"].unsqueeze(-1)
                mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
                parts.append(torch.nn.functional.normalize(mean, dim=-1).cpu().numpy())
        embeddings = np.concatenate(parts)
        ordered = np.empty_like(embeddings)
        ordered[order] = embeddings
        return ordered

    def _kept(self, texts: Sequence[str], model: str, cache: str) -> "NDArray[np.float32]":
        """Return the embeddings of the corpus from the cache, which is written if it is missing."""
        key = {"model": model, "texts": len(texts), "digest": _digest(texts)}
        description = Path(f"{cache}.json")
        if Path(cache).is_file():
            if not description.is_file() or json.loads(description.read_text(encoding="utf-8")) != key:
                raise WrongInput(f"--cache {cache}: holds embeddings of another corpus or model: give another file")
            return np.load(cache)
        embeddings = self.embed(texts)
        with open(cache, "wb") as file:
            np.save(file, embeddings)
        description.write_text(json.dumps(key), encoding="utf-8")
        return embeddings


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.encode())
    return digest.hexdigest()
