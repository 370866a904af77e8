"""A search tool on a server that speaks the Model Context Protocol."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Required, TypedDict

from verl.tools.mcp_base_tool import MCPBaseTool
from verl.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from mcp.types import ContentBlock


class _Search(TypedDict, total=False):
    query: str
    results: Required[list[Json]]


class MCPSearchTool(MCPBaseTool):
    """Reads answers as search services give them: JSON with ``query`` and ``results`` of ``title`` and ``content``."""

    def _parse_tool_result(self, content: "Sequence[ContentBlock]") -> tuple[str, JsonObject]:
        """Return the documents as text, and how many queries and documents there were."""
        texts: list[str] = []
        queries: list[str] = []
        total = 0
        for part in content:
            if part.type != "text":
                continue
            found = _search_of(part.text)
            if found is None:
                texts.append(part.text)
                continue
            queries.append(str(found.get("query", "")))
            total += len(found["results"])
            texts += [_as_read(number, each) for number, each in enumerate(found["results"], start=1)]
        status = "success" if total else "no_results" if queries else "unknown"
        metrics: JsonObject = {
            "status": status,
            "queries": queries,
            "query_count": len(queries),
            "total_results": total,
        }
        return "\n".join(texts), metrics


def _search_of(text: str) -> _Search | None:
    """Parse a search from a JSON text; None if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_search = isinstance(found, dict) and isinstance(found.get("results"), list)
    return found if is_search else None


def _as_read(number: int, result: Json) -> str:
    if not isinstance(result, dict):
        return f"Doc {number}\n{result}\n"
    where = f"\n{result['url']}" if result.get("url") else ""
    return f"Doc {number} (Title: {result.get('title', '')}){where}\n{result.get('content', '')}\n"
