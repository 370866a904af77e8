"""Serve searches in a corpus to ``SearchTool``, on this machine.

    python -m verl.tools.retrieval_server --corpus corpus.jsonl --index bm25
    python -m verl.tools.retrieval_server --corpus corpus.jsonl --index dense --model intfloat/e5-base-v2

The corpus holds one JSON object to a line, with ``id`` and ``contents``, whose first line is the title.
``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and returns
``{"result": [[{"document", "score"}]]}``. With a key, a request has the header ``Authorization: Bearer KEY``.
"""

import argparse
import asyncio
import hmac
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from verl.errors import WrongInput
from verl.tools.retrieval_index import BM25Index, DenseIndex, Document, Index, read_corpus
from verl.utils.net_utils import LOCAL_HOSTS
from verl.utils.parsing import parse_json

MOST_QUERIES = 1024
MOST_QUERY_CHARS = 8192
MOST_DOCUMENTS = 1000
MOST_FOUND = 16_384
MOST_ANSWER_BYTES = 32 << 20
READ_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0
USAGE_ERROR = 2


class RequestRefused(Exception):
    """The server refuses a request; the message says why."""


@dataclass(frozen=True)
class Asked:
    """A request: texts, documents for each, and whether the answer has scores."""

    queries: list[str]
    topk: int
    with_scores: bool

    @classmethod
    def of(cls, body: bytes, topk: int) -> "Asked":
        """Parse a request, whose ``topk`` may be left out.

        Raises: RequestRefused.
        """
        try:
            asked = parse_json(body)
        except ValueError as error:
            raise RequestRefused(f"the request is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise RequestRefused("the request is no JSON object")
        queries = asked.get("queries")
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise RequestRefused("queries must be a list of texts")
        if len(queries) > MOST_QUERIES or any(len(query) > MOST_QUERY_CHARS for query in queries):
            raise RequestRefused(
                f"queries must be at most {MOST_QUERIES} texts of at most {MOST_QUERY_CHARS} characters"
            )
        topk = asked.get("topk") or topk
        if not isinstance(topk, int) or not 1 <= topk <= MOST_DOCUMENTS:
            raise RequestRefused(f"topk must be an integer from 1 to {MOST_DOCUMENTS}")
        if len(queries) * topk > MOST_FOUND:
            raise RequestRefused(f"queries times topk is {len(queries) * topk}: it must be at most {MOST_FOUND}")
        return cls(queries, topk, bool(asked.get("return_scores")))


class Retriever:
    """Answers requests from an index, one after another in a thread, so that the server can always be reached.

    Args: ``key`` is the key that a request must send; None if requests need no key.
    """

    def __init__(self, documents: list[Document], index: Index, topk: int, key: str | None = None) -> None:
        self.documents = documents
        self.index = index
        self.topk = topk
        self.key = key
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
        """Answer a search; the status and ``error`` tell the fault of a bad request."""
        if self.key is not None and not hmac.compare_digest(_key_of(request), self.key.encode()):
            return _refused("the key is missing or wrong: send Authorization: Bearer <key>", 401)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            return _refused(f"the request did not arrive within {READ_TIMEOUT_S:g} s", 408)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                text = await loop.run_in_executor(self._thread, self.answer, body)
        except RequestRefused as error:
            return _refused(str(error), 400)
        except TimeoutError:
            return _refused(f"too many requests wait: no answer within {ANSWER_TIMEOUT_S:g} s", 503)
        return web.Response(text=text, content_type="application/json")

    def answer(self, body: bytes) -> str:
        """Return the answer to a request as JSON.

        Raises: RequestRefused, also for an answer that would be too long.
        """
        asked = Asked.of(body, self.topk)
        found = self.index.search(asked.queries, asked.topk) if asked.queries else []
        written = {hit.place: "" for hits in found for hit in hits}
        for place in written:
            written[place] = json.dumps(self.documents[place]._asdict())
        size = sum(len(written[hit.place]) for hits in found for hit in hits)
        if size > MOST_ANSWER_BYTES:
            raise RequestRefused(
                f"the answer would have {size} bytes, more than {MOST_ANSWER_BYTES}: send fewer queries or a lower topk"
            )
        scored = '{{"document": {}, "score": {}}}'.format
        rows = (
            [
                scored(written[hit.place], json.dumps(hit.score)) if asked.with_scores else written[hit.place]
                for hit in hits
            ]
            for hits in found
        )
        return '{"result": [' + ", ".join(f"[{', '.join(row)}]" for row in rows) + "]}"


def _key_of(request: web.Request) -> bytes:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")


def _refused(why: str, status: int) -> web.Response:
    return web.json_response({"error": why}, status=status)


async def serve(retriever: Retriever, host: str, port: int) -> None:
    """Serve until the process ends."""
    # A client that disconnects cancels its request; a client that sends nothing is disconnected.
    options: Any = {"handler_cancellation": True, "keepalive_timeout": READ_TIMEOUT_S}
    runner = web.AppRunner(retriever.application(), access_log=None, **options)
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
        fromfile_prefix_chars="@",
    )
    parser.add_argument("--corpus", required=True, help="JSON lines or parquet: id and contents, or title and text")
    parser.add_argument("--index", choices=["bm25", "dense"], default="bm25", help="by words, or by embeddings")
    parser.add_argument("--model", help="encoder of a dense index, a folder or a name, such as intfloat/e5-base-v2")
    parser.add_argument("--device", default="cpu", help="device of the encoder")
    parser.add_argument("--cache", help="file that keeps the embeddings of the corpus")
    parser.add_argument("--topk", type=int, default=3, help="documents for each query, where a request names no number")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets every machine ask")
    parser.add_argument("--key", help="text that each request must name, needed where other machines can ask")
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
        if arguments.host not in LOCAL_HOSTS and not arguments.key:
            raise WrongInput(f"--host {arguments.host}: other machines can ask there: give --key, or --host 127.0.0.1")
        documents = read_corpus(arguments.corpus)
        retriever = Retriever(documents, build_index(arguments, documents), arguments.topk, arguments.key)
        asyncio.run(serve(retriever, arguments.host, arguments.port))
    except KeyboardInterrupt:
        return 0
    except (WrongInput, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
