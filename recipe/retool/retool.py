"""Mathematics with a code interpreter: the data set for ``tool_agent``, the interpreter tool, and the scorer.

Source: ReTool (arXiv:2504.11536), and DAPO (arXiv:2503.14476) for data and scorer.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pyarrow as pa

from verl.base_config import one_line
from verl.errors import DataError
from verl.tools.base_tool import Executed
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset.files import Row, concat_tables, written_rows
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import math_dapo

INSTRUCTION = "\nPut the final answer in \\boxed{}."
FILES = (".parquet", ".json", ".jsonl")
SPLIT = "train"
CHUNK_ROWS = 20_000

LEAST_TURNS = 2
"""Number of messages in a conversation without a tool call: the question and its answer."""
REWARD_PER_TURN = 0.05
MOST_WHEN_WRONG = -0.6


# ---- rows


class CustomRLHFDataset(RLHFDataset):
    """Prompts of competition problems for the agent loop ``tool_agent``, which ask for a ``\\boxed`` answer.

    A file is the name of a data set on the hub, a folder with such files, or a parquet file. The columns tell three
    formats of rows apart: ``prompt`` and ``reward_model`` (DAPO-Math-17k, and the output of verl's own scripts),
    ``Problem`` and ``Answer`` (Maxwell-Jia/AIME_2024), ``problem`` and ``answer`` (yentinglin/aime_2025).

    Raises: DataError for rows of another format, and as the base class.
    """

    def read_table(self, path: str) -> pa.Table:
        """Return the rows of a data set as prompts."""
        table = super().read_table(path) if path.endswith(FILES) else _hub_table(path)
        parts = list(_chunks(table, _maker(table.column_names, path), path))
        if not parts:
            raise DataError(f"{path}: has no row: name another data set")
        return concat_tables([path] * len(parts), parts)


def _hub_table(name: str) -> pa.Table:
    """Read a data set from the hub, or from a folder with its files."""
    folder = os.path.expanduser(name)
    try:
        return datasets.load_dataset(folder if os.path.isdir(folder) else name, split=SPLIT).data.table
    except Exception as error:  # datasets raises many classes, for files and for the network
        text = one_line(f"{type(error).__name__}: {error}").rstrip(".")
        raise DataError(f"{name}: cannot be read: {text}: name a data set of the hub, its folder, or a file") from error


def _maker(columns: list[str], path: str) -> Callable[[Row], Row]:
    source = os.path.basename(path.rstrip("/")).lower()
    if {"prompt", "reward_model"} <= set(columns):
        return _with_instruction
    for problem, answer in (("Problem", "Answer"), ("problem", "answer")):
        if {problem, answer} <= set(columns):
            return lambda row: _problem_row(str(row[problem]), str(row[answer]), source)
    raise DataError(
        f"{path}: has the columns {columns}: write prompt and reward_model, or problem and answer, or use RLHFDataset"
    )


def _problem_row(problem: str, answer: str, source: str) -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": problem + INSTRUCTION}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "agent_name": "tool_agent",
    }


def _with_instruction(row: Row) -> Row:
    *before, question = row["prompt"]
    asked = {**question, "content": question["content"] + INSTRUCTION}
    return {**row, "prompt": [*before, asked], "agent_name": "tool_agent"}


def _chunks(table: pa.Table, make: Callable[[Row], Row], path: str) -> Iterator[pa.Table]:
    """Yield the converted rows in chunks, since Python rows take much more memory than Arrow tables."""
    done = 0
    for batch in table.to_batches(max_chunksize=CHUNK_ROWS):
        made = []
        for row in written_rows(pa.Table.from_batches([batch])):
            try:
                made.append(make(row))
            except (TypeError, ValueError, KeyError) as error:
                text = one_line(f"{type(error).__name__}: {error}")
                raise DataError(f"{path}, row {done + len(made)}: is no prompt: {text}: correct the row") from error
        done += len(made)
        yield pa.Table.from_pylist(made)


# ---- the tool

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_SHOW = "(lambda value: value is None or print(value))"


class CustomSandboxFusionTool(SandboxFusionTool):
    """The code interpreter of verl that also prints the value of the last line, as a notebook does.

    Models often put the code into a Markdown fence, and end it with the bare name of the variable that they want.
    """

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Run ``code`` of the parameters, without its fence."""
        code = parameters.get("code")
        if isinstance(code, str):
            parameters = {**parameters, "code": shows_last_value(without_fence(code))}
        return await super().execute(instance_id, parameters, **kwargs)


def without_fence(code: str) -> str:
    """Return the program in the first Markdown fence, or the whole text if there is none."""
    found = _FENCED.search(code)
    return found[1] if found else code


def shows_last_value(code: str) -> str:
    """Change a program so that it also prints the value of its last line, if that is an expression and not None."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # run it unchanged, so that the interpreter reports its error
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1]
    assert last.end_lineno is not None and last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)  # ast counts columns in bytes of UTF-8
    start = sum(map(len, lines[: last.lineno - 1])) + last.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    text = code.encode()
    return (text[:start] + f"{_SHOW}((".encode() + text[start:end] + b"))" + text[end:]).decode()


# ---- the score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Return 1 if the last ``\boxed`` holds the right answer, else a negative score that tool calls raise.

    A wrong response gets ``min(-0.6, -1 + 0.05 * (num_turns - 2))``, so that a model that cannot solve a problem yet
    learns to try the interpreter. ``num_turns`` counts the messages of the conversation: each call adds two.
    """
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    if not result["acc"]:
        turns = (extra_info or {}).get("num_turns") or LEAST_TURNS
        shaped = result["score"] + REWARD_PER_TURN * (int(turns) - LEAST_TURNS)
        result["score"] = min(MOST_WHEN_WRONG, shaped)
    return result


compute_score.lowest_score = -1.0  # type: ignore[attr-defined]  # the score of a response whose scoring fails
