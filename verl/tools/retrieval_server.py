"""Serve searches in a corpus to ``SearchTool``, on this machine.

    python -m verl.tools.retrieval_server --corpus corpus.jsonl --index bm25
    python -m verl.tools.retrieval_server --corpus corpus.jsonl --index dense --model intfloat/e5-base-v2

The corpus holds one JSON object to a line, with ``id`` and ``contents``, whose first line is the title.
``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and returns
``{"result": [[{"document", "score"}]]}``.
"""

import argparse
import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from verl.base_config import WrongInput
from verl.tools.retrieval_index import BM25Index, DenseIndex, Document, Index, read_corpus

MOST_QUERIES = 1024
MOST_QUERY_CHARS = 8192
MOST_DOCUMENTS = 1000
USAGE_ERROR = 2


class Retriever:
    """Answers requests from an index, one after another in a thread, so that the server can always be reached."""

    def __init__(self, documents: list[Document], index: Index, topk: int) -> None:
        self.documents = documents
        self.index = index
        self.topk = topk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application(client_max_size=MOST_QUERIES * MOST_QUERY_CHARS)
        application.router.add_post("/retrieve", self.retrieve)
        application.router.add_get("/health", self.health)
        return application

    async def health(self, request: web.Request) -> web.Response:
        """Say that the server answers, and how many documents it has."""
        return web.json_response({"documents": len(self.documents)})

    async def retrieve(self, request: web.Request) -> web.Response:
        """Answer a search; status 400 says what is wrong with a request."""
        try:
            asked: Any = await request.json()
        except ValueError:
            return _refused("the request is no JSON")
        if not isinstance(asked, dict):
            return _refused("the request is no JSON object")
        queries = asked.get("queries")
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return _refused("queries must be a list of texts")
        if len(queries) > MOST_QUERIES or any(len(query) > MOST_QUERY_CHARS for query in queries):
            return _refused(f"queries must be at most {MOST_QUERIES} texts of at most {MOST_QUERY_CHARS} characters")
        topk = asked.get("topk") or self.topk
        if not isinstance(topk, int) or not 1 <= topk <= MOST_DOCUMENTS:
            return _refused(f"topk must be an integer from 1 to {MOST_DOCUMENTS}")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self.index.search, queries, topk) if queries else []
        result: list[list[Any]] = []
        for hits in found:
            documents = [self.documents[hit.place]._asdict() for hit in hits]
            if asked.get("return_scores"):
                scored = zip(documents, hits, strict=True)
                documents = [{"document": document, "score": hit.score} for document, hit in scored]
            result.append(documents)
        return web.json_response({"result": result})


def _refused(why: str) -> web.Response:
    return web.json_response({"error": why}, status=400)


async def serve(retriever: Retriever, host: str, port: int) -> None:
    """Serve until the process ends."""
    runner = web.AppRunner(retriever.application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        where = f"http://{host}:{runner.addresses[0][1]}/retrieve"
        sys.stdout.write(f"serving {len(retriever.documents)} documents at {where}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.tools.retrieval_server",
        description="Serve searches in a corpus to SearchTool, on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--corpus", required=True, help="JSON lines or parquet: id and contents, or title and text")
    parser.add_argument("--index", choices=["bm25", "dense"], default="bm25", help="by words, or by embeddings")
    parser.add_argument("--model", help="encoder of a dense index, a folder or a name, such as intfloat/e5-base-v2")
    parser.add_argument("--device", default="cpu", help="device of the encoder")
    parser.add_argument("--cache", help="file that keeps the embeddings of the corpus")
    parser.add_argument("--topk", type=int, default=3, help="documents for each query, where a request names no number")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets every machine ask")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    return parser


def build_index(arguments: argparse.Namespace, documents: list[Document]) -> Index:
    """Return the index that the command line asks for.

    Raises: WrongInput if it cannot be made.
    """
    if arguments.index == "bm25":
        return BM25Index(documents)
    if not arguments.model:
        raise WrongInput("--index dense needs --model: give the folder or the name of an encoder")
    return DenseIndex(documents, arguments.model, arguments.device, arguments.cache)


def main() -> int:
    """Serve; return the exit code."""
    arguments = build_parser().parse_args()
    try:
        documents = read_corpus(arguments.corpus)
        retriever = Retriever(documents, build_index(arguments, documents), arguments.topk)
        asyncio.run(serve(retriever, arguments.host, arguments.port))
    except KeyboardInterrupt:
        return 0
    except (WrongInput, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
