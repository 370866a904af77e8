"""Fully asynchronous runs in which everything waits for a random time: ``python -m tests.special_e2e.delayed_runs``.

As ``external_lib`` it has the agent loops ``delayed_turn`` and ``delayed_tools``. The times come from the system, so
that no seed repeats them, and no generator of the run is used.
"""

import asyncio
import functools
import importlib
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.protocol import DataProto
from verl.tools.base_tool import Executed
from verl.tools.calculator_tool import CalculatorTool
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.asynchronous import refuse_two_numbers
from verl.trainer.main_ppo import FullyAsyncTaskRunner, complete, run_ppo

from .always_calls import ShortTurns

MOST_S = 0.5
SAMPLES = 4
SYSTEM = random.SystemRandom()
CONFIG = Path(__file__).resolve().parents[2] / "recipe/fully_async_policy/config"


def wait() -> None:
    """Wait for a random time."""
    time.sleep(SYSTEM.uniform(0, MOST_S))


async def pause() -> None:
    """Wait for a random time, while others go on."""
    await asyncio.sleep(SYSTEM.uniform(0, MOST_S))


@register("delayed_turn")
class DelayedTurn(SingleTurnAgentLoop):
    """Waits before the request and after the response."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the response of a row."""
        await pause()
        output = await super().run(sampling_params, **kwargs)
        await pause()
        return output


@register("delayed_tools")
class DelayedTools(ShortTurns):
    """Waits before the first turn and after the last."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        await pause()
        output = await super().run(sampling_params, **kwargs)
        await pause()
        return output


class SlowCalculatorTool(CalculatorTool):
    """Takes its time."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Return the value after a random time."""
        await pause()
        return await super().execute(instance_id, parameters, **kwargs)


class DelayedTaskRunner(FullyAsyncTaskRunner):
    """Has a trainer that sends, receives, scores and publishes after random times."""

    def trainer_class(self) -> Any:
        """Return it."""
        from verl.trainer.asynchronous.scheduler import Group
        from verl.trainer.asynchronous.trainer import AsyncTrainer

        class Delayed(AsyncTrainer):
            def _send(self, group: Group) -> "dict[int, Future[DataProto]]":
                answers: dict[int, Future[DataProto]] = {place: Future() for place in group.missing}
                threading.Thread(target=self._send_late, args=(group, answers), daemon=True).start()
                return answers

            def _send_late(self, group: Group, answers: "dict[int, Future[DataProto]]") -> None:
                wait()
                for place, sent in super()._send(group).items():
                    sent.add_done_callback(functools.partial(_pass_on, answers[place]))

            def _receive(self, group: Group, place: int) -> bool | None:
                time.sleep(SYSTEM.uniform(0, MOST_S / SAMPLES))  # one after the other
                return super()._receive(group, place)

            def score(self, *arguments: Any) -> DataProto:
                wait()
                return super().score(*arguments)

            def sync_weights(self) -> None:
                wait()
                super().sync_weights()
                wait()

        return Delayed


def _pass_on(answer: "Future[DataProto]", ended: "Future[DataProto]") -> None:
    error = ended.exception()
    if error is None:
        answer.set_result(ended.result())
    else:
        answer.set_exception(error)


@hydra_main("fully_async_ppo_trainer", config_path=str(CONFIG))
def main(config: DictConfig) -> None:
    """Train with delays."""
    refuse_two_numbers(config, CONFIG / "fully_async.yaml")
    complete(config)
    run_ppo(config, DelayedTaskRunner)


if __name__ == "__main__":
    importlib.import_module("tests.special_e2e.delayed_runs").main()
