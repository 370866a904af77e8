"""The actor that runs the agent loops of a part of a batch, all at the same time."""

import asyncio
import gc
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from ray import cloudpickle

from verl.base_config import omega_conf_to_dataclass
from verl.errors import WrongInput
from verl.experimental.agent_loop.attempts import OK, Attempt, Sampling
from verl.experimental.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.batch import TRAIN, BatchOfAttempts, Place, Policy, Task, kind_of, places_of
from verl.experimental.agent_loop.blocking import blocking_is_named
from verl.experimental.agent_loop.held import KEPT_COLUMN, KeptTokens
from verl.experimental.agent_loop.later_images import WholeTrajectories
from verl.experimental.agent_loop.registry import (
    ONE_TURN,
    build_agent_loop,
    check_names,
    read_agent_loops,
    register_all,
)
from verl.experimental.agent_loop.rewards import SCORED_HERE, SCORING_COLUMNS, TrajectoryScorer
from verl.experimental.agent_loop.rows import check_output, check_sampled, rows_of
from verl.experimental.agent_loop.segments import last_segment
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.experimental.agent_loop.spans import trajectory_span
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import BY_REFERENCE, by_reference, fetched
from verl.single_controller.base.actor import Actor
from verl.utils import envs
from verl.utils.failures import only_warning, replacing_errors
from verl.utils.import_utils import import_external_libs
from verl.utils.observe import timeline
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.py_functional import object_array
from verl.utils.vision.multi_modal import resolve
from verl.workers.rollout.base import is_greedy, log_prob_temperature, sampling_values

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

_MOST_TRACES = 100_000
"""Entries of MLflow's queue in an agent loop worker."""


class AgentLoopWorkerBase:
    """Runs an agent loop for each row of a batch.

    Args: ``config`` is that of the run; ``server_handles`` are the rollout servers.
    """

    def __init__(self, config: DictConfig, server_handles: Sequence[Actor], rm_executor: Actor | None = None) -> None:
        self.config = config
        self.rm_executor = rm_executor
        shared = config.actor_rollout_ref
        import_external_libs(shared.model.get("external_lib"))  # may register loops
        self.rollout_config: RolloutConfig = omega_conf_to_dataclass(shared.rollout)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(shared.model)
        self.tokenizer = self.model_config.tokenizer
        self.processor = self.model_config.processor
        self._vocab_size: int | None = getattr(self.model_config.hf_config.get_text_config(), "vocab_size", None)
        self.server_manager = AsyncLLMServerManager(config, server_handles)
        self.scorer = TrajectoryScorer(config, self.tokenizer, partial(self._as_rows, trained=False))
        kwargs = config.data.get("mm_processor_kwargs") or {}
        self.whole = WholeTrajectories(self.processor, kwargs) if self.processor is not None else None
        agent = self.rollout_config.agent
        if agent.agent_loop_config_path:
            register_all(read_agent_loops(os.path.expanduser(agent.agent_loop_config_path)))
        self._prepared: set[str] = set()
        self._has_warned = False
        trainer = config.trainer
        trace = self.rollout_config.trace
        # A full queue of MLflow blocks all trajectories, so the queue must hold the traces of a whole batch.
        envs.write_default({"MLFLOW_ASYNC_TRACE_LOGGING_MAX_QUEUE_SIZE": str(_MOST_TRACES)})
        self._flush: asyncio.Future[None] | None = None
        RolloutTraceConfig.init(
            trace.project_name or trainer.project_name,
            trace.experiment_name or trainer.experiment_name,
            trace.backend,
            trace.token2text,
            self.tokenizer.decode,
            trace.max_samples_per_step_per_worker,
        )

    async def prepare(self, names: Sequence[str] | None = None) -> None:
        """Build each of the named loops once; by default, the loop of rows without ``agent_name``.

        An error at this point, such as a wrong file of tools, affects every trajectory, so ``rollout.agent.on_failure``
        does not apply to it.

        Raises: WrongInput naming the loop.
        """
        for name in dict.fromkeys([self.rollout_config.default_loop] if names is None else names):
            if name in self._prepared:
                continue
            with replacing_errors(partial(_not_built, name)):
                self._build(name, self.server_manager)
            self._prepared.add(name)
        if names is None:  # an actor starts: its present objects stay, so the garbage collector can skip them
            gc.collect()
            gc.freeze()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Return a trajectory for each row; see ``rows_of``.

        Args: as ``BaseRollout.generate_sequences``; non-tensor ``agent_name`` chooses the loop of a row. Tensors
            ``row`` and ``sample`` (B,) say where a row stands in the batch of the step, and which sample it is;
            ``KEPT_COLUMN`` holds tokens with which its first turn begins.
        Returns: meta ``seconds`` holds the seconds of each trajectory by activity, ``attempts`` their account,
            ``versions`` the oldest version of the weights that sampled a token of each row, None where nobody knows,
            ``sampled_by`` the versions of each row by token, as ``TokenOutput.versions``, if its loop keeps turns,
            ``elapsed_s`` the seconds of the whole call, and ``reward_extra_keys`` the columns that the scorer has
            added, if meta ``SCORED_HERE`` asks to score.
        Raises: TrajectoryError naming row, loop and attempt, as ``rollout.agent.on_failure`` says.
        """
        started = time.perf_counter()
        batch = fetched(batch)
        kept = batch.non_tensor_batch.pop(KEPT_COLUMN, [None] * len(batch))
        default = self.rollout_config.default_loop
        named = batch.non_tensor_batch.get("agent_name", [None] * len(batch))
        names = [default if name is None else str(name) for name in named]
        check_names(names)
        await self.prepare(names)
        await self.server_manager.revive()
        params = self._sampling_params(batch)
        places = places_of(batch)
        if places and places[0].row == 0:  # only one worker warns
            self._warn_of_idle_files(names)
        tasks = [
            Task(
                place,
                name,
                params[index].get("seed"),
                self._runner(batch, index, name, params[index], place),
                kept[index],
            )
            for index, (name, place) in enumerate(zip(names, places, strict=True))
        ]
        meta = batch.meta_info
        # Greedy baselines of remax; training with rollout.do_sample=false does not set this key.
        greedy = meta.get("do_sample") is False
        policy = Policy.of(self.rollout_config, meta, greedy)
        kind = kind_of(meta, greedy)
        clock = self.server_manager.held.clock if kind == TRAIN else time.monotonic
        run = BatchOfAttempts(tasks, policy, kind, meta.get("global_steps"), clock)
        if meta.get(timeline.RECORDED):
            timeline.start()
        try:
            with blocking_is_named():
                outputs = await run.results()
        finally:
            part = timeline.take("agent loops")
        self._send_traces()
        result = self._as_rows(outputs, batch)
        for name in SCORING_COLUMNS:  # the trainer keeps these columns
            result.non_tensor_batch.pop(name, None)
        result.meta_info["reward_extra_keys"] = sorted(self.scorer.extra_keys & result.non_tensor_batch.keys())
        result.meta_info["seconds"] = [output.metrics.model_dump() for output in outputs if output is not None]
        result.meta_info["attempts"] = [attempt.line() for attempt in run.attempts]
        versions = {(each.uid, each.sample): each.oldest_version for each in run.attempts if each.outcome == OK}
        result.meta_info["versions"] = [versions.get((place.uid, place.sample)) for place in places]
        turns = [[] if output is None else output.turns for output in outputs]
        result.meta_info["sampled_by"] = [[pair for turn in of_row for pair in turn.versions] for of_row in turns]
        result.meta_info |= log_prob_temperature(batch, self.rollout_config)
        result.meta_info[timeline.RECORDED] = part
        result.meta_info["elapsed_s"] = time.perf_counter() - started
        return by_reference(result) if meta.get(BY_REFERENCE) else result

    def _warn_of_idle_files(self, names: Sequence[str]) -> None:
        """Warn once if the configuration names tools or interactions, but all rows use the single-turn loop."""
        turns = self.rollout_config.multi_turn
        idle = [key for key in ("tool_config_path", "function_tool_path", "interaction_config_path") if turns[key]]
        if idle and set(names) == {ONE_TURN} and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "actor_rollout_ref.rollout.multi_turn.%s=%s: has no effect, all rows go to %s: write "
                "multi_turn.enable=true, or name another loop in the column agent_name",
                *(idle[0], turns[idle[0]], ONE_TURN),
            )

    def _send_traces(self) -> None:
        """Let a thread wait until the traces so far are sent, unless one already does."""
        if RolloutTraceConfig.get_backend() is not None and (self._flush is None or self._flush.done()):
            self._flush = asyncio.get_running_loop().run_in_executor(None, _flush_traces)

    async def flush_traces(self) -> None:
        """Wait until all traces are sent; the process may end then."""
        if self._flush is not None:
            await self._flush
        self._send_traces()
        if self._flush is not None:
            await self._flush

    def set_servers(self, server_handles: Sequence[Actor]) -> None:
        """Use these rollout servers from now on."""
        self.server_manager.set_servers(server_handles)

    async def hold(self, waits_for_others: bool) -> list[KeptTokens]:
        """Interrupt the requests of training, which keep their tokens; return those of first turns."""
        return await self.server_manager.held.begin(waits_for_others)

    def go_on(self) -> None:
        """Let the requests of training go on."""
        self.server_manager.held.end()

    def _runner(
        self, batch: DataProto, index: int, name: str, sampling_params: Sampling, place: Place
    ) -> Callable[[Attempt], Awaitable[AgentLoopOutput]]:
        """Return the function that makes one attempt at the trajectory of a row."""
        meta = batch.meta_info
        step = meta.get("global_steps")
        validate = bool(meta.get("validate", False))

        async def run(attempt: Attempt) -> AgentLoopOutput:
            with trajectory_span(attempt, place, step, validate) as ended:
                loop = self._build(name, self.server_manager.of(attempt))
                made = loop.run(dict(sampling_params), **self._row(batch, index))
                if not inspect.isawaitable(made):
                    raise TypeError(f"run returned {type(made).__name__} at once: write it as async def")
                outputs = await made
                width = tensors_of(batch)["input_ids"].shape[1]
                output = last_segment(outputs, width, self.rollout_config.response_length)
                if "messages" in output.extra_fields:  # the id under which the account of attempts lists it
                    output.extra_fields.setdefault("request_id", attempt.id)
                # An error at this point fails the attempt; the same error in the trainer would end the run.
                check_output(place.row, output, width, self._vocab_size)
                check_sampled(place.row, output, self.rollout_config.response_length)
                _check_sendable(place.row, output)
                if meta.get(SCORED_HERE):
                    await self.scorer.add_score([output], batch, index)
                ended([*output.earlier, output])
            return output

        return run

    def _build(self, name: str, server_manager: AsyncLLMServerManager) -> AgentLoopBase:
        return build_agent_loop(
            name, self.config, server_manager=server_manager, tokenizer=self.tokenizer, processor=self.processor
        )

    def _as_rows(self, outputs: Sequence[AgentLoopOutput | None], batch: DataProto, trained: bool = True) -> DataProto:
        """Return trajectories as rows; without ``trained`` the rows lack the inputs of images."""
        pad = batch.meta_info.get("pad_token_id", self.model_config.pad_token_id)
        whole = self.whole if trained or self.whole is None else self.whole.without_inputs()
        return rows_of(outputs, batch, self.rollout_config.response_length, pad, whole)

    def _row(self, batch: DataProto, index: int) -> dict[str, Any]:
        """Return the columns of a row, without the nulls of columns that the row lacks.

        The values are copies, so a loop may change them without effect on other samples and attempts.
        """
        named = ((name, own(column[index])) for name, column in batch.non_tensor_batch.items() if name != "agent_name")
        row = {name: value for name, value in named if value is not None}
        if row.get("multi_modal_data") is not None:
            row["multi_modal_data"] = resolve([row["multi_modal_data"]])[0] or None
        return row

    def _sampling_params(self, batch: DataProto) -> list[Sampling]:
        """Return the sampling parameters of each row; the row's seed is the seed of its first turn."""
        shared: Sampling = {
            **sampling_values(batch, self.rollout_config),
            "logprobs": self.rollout_config.calculate_log_probs,
        }
        tensors = tensors_of(batch)
        if is_greedy(batch, self.rollout_config) or "sampling_seed" not in tensors.keys():
            return [dict(shared) for _ in range(len(batch))]
        return [shared | {"seed": seed} for seed in tensors["sampling_seed"].tolist()]


def _check_sendable(row: int, output: AgentLoopOutput) -> None:
    """Check that Ray can send the columns of a trajectory to the trainer.

    Raises: ValueError naming row and column.
    """
    for segment in (*output.earlier, output):
        for name, value in segment.extra_fields.items():
            if name == TURNS_COLUMN or isinstance(value, str | int | float | None):
                continue
            try:
                cloudpickle.dumps(value)
            except Exception as error:  # each class fails to pickle in its own way
                raise ValueError(
                    f"trajectory {row}: extra_fields[{name!r}] cannot be sent to the trainer "
                    f"({type(error).__name__}: {error}): return numbers, texts, and lists or mappings of them"
                ) from error


def own(value: Any) -> Any:
    """Copy the lists and mappings of a value, but not their other members, such as images."""
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    if isinstance(value, list):  # lists of tokens are long, and hold no lists or mappings
        return value.copy() if value and isinstance(value[0], int) else [own(each) for each in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        copied = value.copy()
        copied[...] = object_array([own(each) for each in value.ravel()]).reshape(value.shape)
        return copied
    return value


def _not_built(name: str, error: Exception) -> WrongInput:
    return WrongInput(f"agent loop {name} cannot be built: {type(error).__name__}: {error}")


def _flush_traces() -> None:
    with only_warning(logger, "rollout.trace: some traces were not sent"):
        RolloutTraceConfig.flush()


class AgentLoopWorker(AgentLoopWorkerBase):
    """The worker that ``AgentLoopManager`` starts as an actor."""
