"""Search a corpus through a retrieval service, such as ``verl.tools.retrieval_server``."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.base_config import BaseConfig, Violation, setting
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import OUTCOME, BadArguments, ToolOutcome
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.running import RunningCalls
from verl.utils.class_files import read_options
from verl.utils.concurrency import ConcurrencyLimit
from verl.utils.http_client import NoReply, NoReplyInTime, post_json, url_problem
from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import Json, JsonObject
from verl.utils.masking import MaskedError
from verl.utils.parsing import parse_json

# Users' forks of verl and tests import these names.
_POOL = ("PoolMode", "TokenBucketWorker", "init_search_execution_pool")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_POOL, "verl.compat.execution_pool"))

RETRIED = frozenset({500, 502, 503, 504})
NOTHING_FOUND = "No search results found."


class RetrievalError(MaskedError, RuntimeError):
    """The service gave no result, for the reason in the message."""


class RetrievalTimeout(RetrievalError):
    """The service was too slow, in every attempt."""


@dataclass
class SearchToolConfig(BaseConfig):
    """``config`` of the tool."""

    _is_closed: ClassVar[bool] = True

    retrieval_service_url: str | None = setting(None, "address of the service, with its path, such as /retrieve")
    api_key: str | None = setting(None, "key of the service, if it wants one")
    topk: int = setting(3, "documents for each query", at_least=1)
    num_workers: int = setting(120, "requests of a process at once", at_least=1)
    rate_limit: int = setting(120, "requests of all processes of this machine at once", at_least=1)
    enable_global_rate_limit: bool = setting(True, "whether rate_limit applies")
    timeout: float = setting(30.0, "seconds for one attempt", above=0)
    max_attempts: int = setting(10, "attempts", at_least=1)
    retry_delay_s: float = setting(1.0, "delay after the first attempt; after the n-th n times as long", at_least=0)

    def rules(self) -> Iterator[Violation]:
        """Yield the faults of the tool's settings."""
        problem = url_problem(self.retrieval_service_url)
        if problem is not None:
            yield Violation("retrieval_service_url", self.retrieval_service_url, problem)


class SearchTool(BaseTool):
    """Answers ``query_list`` with the best documents for each query."""

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.options = read_options(self, config, SearchToolConfig)
        assert self.options.retrieval_service_url is not None
        self._url: str = self.options.retrieval_service_url
        shared = self.options.rate_limit if self.options.enable_global_rate_limit else None
        self._limit = ConcurrencyLimit(self.options.num_workers, shared, f"search {self._url}")
        self._running = RunningCalls()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is not None:
            return self.tool_schema
        queries = {"type": "array", "items": {"type": "string"}, "description": "What to search for."}
        parameters = {"type": "object", "properties": {"query_list": queries}, "required": ["query_list"]}
        function = {"name": "search", "description": "Search for documents.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Search.

        Returns: JSON ``{"result": text}``, reward 0, and how many queries and documents there were.

        Raises: BadArguments without queries.
        """
        queries = parameters.get("query_list")
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(each, str) for each in queries):
            raise BadArguments("query_list must be a list of texts that is not empty.")
        metrics: JsonObject = {"query_count": len(queries), "total_results": 0, "api_request_error": None}
        try:
            with self._running.call(instance_id):
                found = await self._retrieve(queries)
        except RetrievalError as error:
            outcome = ToolOutcome.TIMEOUT if isinstance(error, RetrievalTimeout) else ToolOutcome.ERROR
            metrics |= {"status": "api_error", "api_request_error": str(error), OUTCOME: outcome}
            return _as_json(f"Search error: {error}"), 0.0, metrics
        count = sum(map(len, found))
        metrics |= {"status": "success" if count else "no_results", "total_results": count}
        text = "\n---\n".join(_as_read(documents) for documents in found) if count else NOTHING_FOUND
        return _as_json(text), 0.0, metrics

    async def abort(self, instance_id: str) -> None:
        """Cancel the searches of an instance."""
        self._running.cancel(instance_id)

    async def _retrieve(self, queries: Sequence[str]) -> list[list[Json]]:
        """Return the documents for each query.

        Raises: RetrievalError.
        """
        request: JsonObject = {"queries": queries, "topk": self.options.topk, "return_scores": True}
        key = self.options.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        failure: RetrievalError | None = None
        for attempt in range(1, self.options.max_attempts + 1):
            if failure is not None:
                await asyncio.sleep(self.options.retry_delay_s * (attempt - 1))
            try:
                async with self._limit.slot():
                    reply = await post_json(self._url, request, self.options.timeout, headers)
            except NoReplyInTime as error:
                failure = RetrievalTimeout(f"{error} in attempt {attempt}")
                continue
            except NoReply as error:
                failure = RetrievalError(f"{error} in attempt {attempt}")
                continue
            if reply.status == 200:
                return _documents(self._url, reply.text, len(queries))
            failure = RetrievalError(f"{self._url}: HTTP status {reply.status} in attempt {attempt}")
            if reply.status not in RETRIED:
                break
        assert failure is not None
        raise failure


def _documents(url: str, text: str, count: int) -> list[list[Json]]:
    """Return the result of a reply, a list of documents for each query.

    Raises: RetrievalError if it is none.
    """
    try:
        found = parse_json(text)["result"]
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, list) for each in found):
        raise RetrievalError(f"{url}: the reply is no list of documents for each query: {text[:200]!r}")
    return found


def _as_read(documents: Sequence[Json]) -> str:
    """Return the documents of a query as the model reads them: the first line of each is its title."""
    parts = []
    for number, each in enumerate(documents, start=1):
        document = each.get("document", each) if isinstance(each, dict) else each
        contents = document.get("contents", "") if isinstance(document, dict) else document
        title, _, text = str(contents).partition("\n")
        parts.append(f"Doc {number} (Title: {title})\n{text}\n")
    return "\n".join(parts)


def _as_json(text: str) -> ToolResponse:
    return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False))
