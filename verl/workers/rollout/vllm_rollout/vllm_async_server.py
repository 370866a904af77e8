"""vLLM on its own resources: the actor that serves, and the replicas of both placements."""

from typing import TYPE_CHECKING

from verl.utils import envs
from verl.utils.engine_versions import STANDALONE, check_vllm
from verl.workers.rollout.engine_server import EngineServer, OpenRequest
from verl.workers.rollout.engine_settings import is_batch_invariant
from verl.workers.rollout.server import TokenOutput
from verl.workers.rollout.server_replica import RolloutReplica
from verl.workers.rollout.vllm_rollout.engine import VLLMEngine
from verl.workers.rollout.vllm_rollout.engine_args import INVARIANT_VARIABLE, build_engine_args
from verl.workers.rollout.vllm_rollout.importing import import_vllm
from verl.workers.rollout.vllm_rollout.media import Request
from verl.workers.rollout.vllm_rollout.requests import VLLMRequestForm, refusals, token_output
from verl.workers.rollout.vllm_rollout.sockets import collect_sockets

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as EngineParams

    from verl.workers.config import HFModelConfig


class vLLMServer(EngineServer[VLLMEngine, Request, "EngineParams"]):
    """A vLLM engine in separate processes; see ``EngineServer``."""

    def _start_engine(self, model_config: "HFModelConfig") -> tuple[VLLMEngine, VLLMRequestForm]:
        check_vllm(STANDALONE)
        invariant = is_batch_invariant(self.config)
        import_vllm(batch_invariant=invariant)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        envs.write({INVARIANT_VARIABLE: str(int(invariant))})
        args = build_engine_args(self.config, model_config, standalone=True)
        collect_sockets()
        engine = VLLMEngine(AsyncLLM.from_engine_args(AsyncEngineArgs(**args)))
        seeds = self.seeds
        form = VLLMRequestForm(
            self.config, model_config, engine.context_length, engine.vocab_size, lambda: int(seeds.draw(1))
        )
        return engine, form

    def _refusals(self) -> tuple[type[Exception], ...]:
        return refusals()

    def _deaths(self) -> tuple[type[Exception], ...]:
        from vllm.v1.engine import exceptions

        return (exceptions.EngineDeadError,)

    async def _ask_engine(self, entry: OpenRequest, prompt: Request, params: "EngineParams") -> TokenOutput:
        last: RequestOutput | None = None
        async for output in self._engine.generate(prompt, params, entry.key):
            last = output
        assert last is not None
        return token_output(last, prompt, params, entry.arrived, entry.started_at)


class vLLMReplica(RolloutReplica):
    """An engine in the processes of the trainer, whose first worker takes the requests, or a standalone server."""

    server_class: type = vLLMServer

    def launch_servers(self) -> None:
        """Let the first worker serve, which has the engine in its process; a standalone replica starts an actor."""
        if self.workers:
            self._server_handle = self.workers[0]
        else:
            self._server_handle = self.start_server(f"vllm_server_{self.replica_rank}_0")
