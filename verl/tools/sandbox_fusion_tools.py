"""Run code that the model writes, in the sandbox of this machine or in a SandboxFusion service."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from verl.base_config import BaseConfig, Violation, setting
from verl.errors import SandboxError, WrongInput
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import OUTCOME, BadArguments, ToolError, ToolOutcome
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.running import RunningCalls
from verl.utils.class_files import read_options
from verl.utils.concurrency import ConcurrencyLimit
from verl.utils.http_client import url_problem
from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import Json, JsonObject
from verl.utils.sandbox import Run, Test, isolation_problem, run_tests
from verl.utils.sandbox.remote import Part, RemoteSandboxError, Reply, run_remotely_async

# Users' forks of verl and tests import these names.
_POOL = ("ExecutionWorker", "PoolMode", "TokenBucketWorker", "init_execution_pool")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_POOL, "verl.compat.execution_pool"))

PYTHON = "python"
_STATUS = {"TimeLimitExceeded": "timeout", "Error": "runtime error"}


@dataclass
class SandboxToolConfig(BaseConfig):
    """``config`` of the tool."""

    _is_closed: ClassVar[bool] = True

    sandbox_fusion_url: str | None = setting(None, "address of the service; null runs the code on this machine")
    num_workers: int = setting(10, "programs of a process at once", at_least=1)
    rate_limit: int = setting(10, "programs of all processes of this machine at once", at_least=1)
    enable_global_rate_limit: bool = setting(True, "whether rate_limit applies")
    default_timeout: float = setting(30.0, "seconds that a program may compute", above=0)
    default_language: str = setting(PYTHON, "language of the code")
    memory_limit_mb: int = setting(1024, "memory of a program", at_least=16)
    allow_unisolated: bool = setting(False, "run code with the rights of the run where this machine cannot isolate it")

    def rules(self) -> Iterator[Violation]:
        """Yield the faults of the tool's settings."""
        problem = None if self.sandbox_fusion_url is None else url_problem(self.sandbox_fusion_url)
        if problem is not None:
            yield Violation("sandbox_fusion_url", self.sandbox_fusion_url, problem)
        if self.sandbox_fusion_url is None and self.default_language != PYTHON:
            text = "the sandbox of this machine runs python only: set sandbox_fusion_url for other languages"
            yield Violation("default_language", self.default_language, text)


@dataclass(frozen=True)
class Ran:
    """The result of a program: status (``ok``, ``timeout``, ``runtime error`` or the like), and whole output."""

    status: str
    text: str


class SandboxFusionTool(BaseTool):
    """Runs ``code`` and answers with its output. Each call starts without state of earlier calls."""

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.options = read_options(self, config, SandboxToolConfig)
        where = self.options.sandbox_fusion_url
        problem = isolation_problem() if where is None and not self.options.allow_unisolated else None
        if problem is not None:
            raise WrongInput(
                f"config.sandbox_fusion_url=null: this machine cannot isolate code ({problem}): set the address of a "
                "service, or config.allow_unisolated=true if you trust the model"
            )
        shared = self.options.rate_limit if self.options.enable_global_rate_limit else None
        self._limit = ConcurrencyLimit(self.options.num_workers, shared, f"code {where or 'here'}")
        self._pool = ThreadPoolExecutor(self.options.num_workers, thread_name_prefix="code")
        self._running = RunningCalls()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is not None:
            return self.tool_schema
        code = {"type": "string", "description": "The code to run. It shows its results by printing them."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {
            "name": "code_interpreter",
            "description": "Run code and return what it prints.",
            "parameters": parameters,
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Run ``code``, by default for ``default_timeout`` seconds in ``default_language``.

        Returns: what it wrote, reward 0, and ``status``. The failure of a program is an ordinary answer.

        Raises: BadArguments without code, ToolError if the sandbox fails.
        """
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise BadArguments("code must be a text that is not empty.")
        language = str(parameters.get("language", self.options.default_language))
        timeout_s = parameters.get("timeout", self.options.default_timeout)
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s:
            raise BadArguments("timeout must be a number of seconds above 0.")
        ran = await self.run_code(instance_id, code, min(timeout_s, self.options.default_timeout), language)
        outcome = ToolOutcome.TIMEOUT if ran.status == "timeout" else ToolOutcome.OK
        return ToolResponse(text=ran.text), 0.0, {"status": ran.status, OUTCOME: outcome}

    async def run_code(self, instance_id: str, code: str, timeout_s: float, language: str = PYTHON) -> Ran:
        """Run a program; ``abort`` of the instance kills it, or closes the connection to the service.

        Raises: BadArguments for a language that cannot run, ToolError if the sandbox fails.
        """
        if self.options.sandbox_fusion_url is None and language != PYTHON:
            raise BadArguments(f"code must be in {PYTHON}, not {language}.")
        with self._running.call(instance_id):
            async with self._limit.slot():
                try:
                    if self.options.sandbox_fusion_url is None:
                        return await self._run_here(code, timeout_s)
                    return await self._run_there(self.options.sandbox_fusion_url, code, timeout_s, language)
                except (SandboxError, RemoteSandboxError) as error:
                    raise ToolError(f"the code could not be run: {error}") from error

    async def abort(self, instance_id: str) -> None:
        """Cancel the running programs of an instance."""
        self._running.cancel(instance_id)

    async def _run_here(self, code: str, timeout_s: float) -> Ran:
        cancelled = threading.Event()
        work = partial(
            run_tests,
            code,
            [Test()],
            timeout_s=timeout_s,
            memory_limit_mb=self.options.memory_limit_mb,
            allow_unisolated=self.options.allow_unisolated,
            cancelled=cancelled,
        )
        try:
            runs: list[Run] = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            cancelled.set()
        return _as_read(runs[0].status, runs[0].stdout, runs[0].stderr, timeout_s)

    async def _run_there(self, url: str, code: str, timeout_s: float, language: str) -> Ran:
        reply = await run_remotely_async(url, code, None, timeout_s, self.options.memory_limit_mb, language)
        return _ran_there(reply, timeout_s)


def _ran_there(reply: Reply, timeout_s: float) -> Ran:
    """Return how a program ended from the reply of the service.

    Raises: RemoteSandboxError if it did not run.
    """
    compilation: Part = reply.get("compile_result") or {}
    execution: Part = reply.get("run_result") or {}
    if compilation.get("status") in _STATUS:
        return _as_read("compile error", "", compilation.get("stderr") or "", timeout_s)
    status = execution.get("status")
    if status in _STATUS:
        return _as_read(_STATUS[status], execution.get("stdout") or "", execution.get("stderr") or "", timeout_s)
    if status != "Finished":
        raise RemoteSandboxError(str(reply.get("message") or f"status {reply['status']!r}"))
    ended = "ok" if execution.get("return_code") in (0, None) else "runtime error"
    return _as_read(ended, execution.get("stdout") or "", execution.get("stderr") or "", timeout_s)


def _as_read(status: str, stdout: str, stderr: str, timeout_s: float) -> Ran:
    """Return the answer for the model: the program's whole output, and the reason if it ended early."""
    text = stdout + stderr
    if status == "timeout":
        text += f"\nThe program was stopped after {timeout_s:g} s."
    elif status == "output limit":
        text += "\nThe program was stopped because it wrote too much."
    elif not text.strip():
        text = "The program printed nothing." if status == "ok" else f"The program ended with a {status}."
    return Ran(status, text.strip("\n"))
