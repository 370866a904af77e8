"""All patches of SGLang, with the versions that need them and the condition for their removal.

They were written for and tested with SGLang 0.5.21 to 0.5.23. A replacement of a function of SGLang hands
on the keywords that it does not know. The patches change the process of a scheduler before it starts,
``sockets_in`` that of the engine's owner, as long as the engine starts, and ``standardize_towers`` any process that
imports SGLang.
"""

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from verl.utils.device import get_device_name
from verl.utils.engine_versions import FIRST_SGLANG, LAST_SGLANG, has_sglang_kernels, installed_version
from verl.utils.json_types import JsonObject
from verl.utils.numerics.blocks import on_blocks, product_on_blocks
from verl.utils.numerics.draws import draw_by_seed, keep_likely, log_probs_within

if TYPE_CHECKING:
    from tempfile import _TemporaryFileWrapper

    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.logprob_processor import LogprobResult
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.managers.io_struct import AbortReq, CheckWeightsReqInput
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput, Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from zmq import Socket

ResultT = TypeVar("ResultT")
"""The answer of a rank to a call."""


def apply(batch_invariant: bool) -> None:
    """Apply the patches that every scheduler needs.

    Args: with ``batch_invariant`` no log-probability of a dense model depends on the other requests of a step.
    """
    standardize_towers()
    bind_no_threads()
    answer_aborted()
    end_at_own_tokens()
    penalise_tokens_of_prompts()
    skip_experts_of_others()
    if is_supported():
        draw_by_seeds()
        see_frame_by_frame()
        name_channels()
        sleep_in_pauses()
    if batch_invariant:
        choose_products()


def is_supported() -> bool:
    """Return whether SGLang has one of the versions that these patches were tested with."""
    return FIRST_SGLANG <= Version(installed_version("sglang") or "0") <= LAST_SGLANG


def without_seeds(sampling_backend: str | None) -> str | None:
    """Return why the tokens of a request depend on more than its seed; None if they do not."""
    if not is_supported():
        return (
            f"SGLang {installed_version('sglang')} is not one of the versions {FIRST_SGLANG} to {LAST_SGLANG} whose "
            "sampling is patched: samples are reproducible by schedule only, and not by the seeds of requests"
        )
    if sampling_backend != _SAMPLING_BACKEND:
        return (
            f"sampling_backend={sampling_backend} takes no seeds: samples are reproducible by schedule only, and not "
            f"by the seeds of requests; write sampling_backend={_SAMPLING_BACKEND} in "
            "actor_rollout_ref.rollout.engine_kwargs.sglang"
        )
    return None


_SAMPLING_BACKEND = "pytorch"


def draw_by_seeds() -> None:
    """Draw each token by its request's seed and its position, and score it under the distribution it was drawn from.

    Versions: 0.5.21 to 0.5.23. SGLang reads seeds with ``enable_deterministic_inference`` only, which refuses the
    attention of a CPU, and draws by them with a Triton kernel. There a token also depends on the other requests of its
    step: if one of them has a limit (top-p), all are drawn in the order of their probabilities. The logarithm of a
    softmax is less exact than ``log_softmax``, and knows nothing of limits. A request without a seed gets one by its
    id, which all ranks know. Remove when ``enable_deterministic_inference`` works with every backend, and draws by
    token.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from_schedule_batch = SamplingBatchInfo.from_schedule_batch.__func__
    init = sampler.Sampler.__init__
    draw = sampler.sampling_from_probs_torch
    draw_limited = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    forward = sampler.Sampler.forward
    compute_logprobs = OutputLogprobProcessor.compute_logprobs
    drawn_from: dict[str, Tensor] = {}  # in this step: probabilities without excluded tokens, and the rows with limits

    def with_seeds(
        cls: type[SamplingBatchInfo], batch: "ScheduleBatch", vocab_size: int, **more: Any
    ) -> SamplingBatchInfo:
        info = from_schedule_batch(cls, batch, vocab_size, **more)
        if get_exec().kernel.sampling_backend == _SAMPLING_BACKEND and batch.spec_algorithm.is_none():
            seeds = [_seed_of(request) for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)
        return info

    def init_exact(self: sampler.Sampler, **more: Any) -> None:
        init(self, **more)
        self.enable_deterministic = True  # this field chooses log_softmax, and nothing else

    def forward_of_step(self: sampler.Sampler, *args: Any, **more: Any) -> Tensor:
        drawn_from.clear()
        return forward(self, *args, **more)

    def compute_within(self: OutputLogprobProcessor, logprobs: Tensor, *args: Any, **more: Any) -> "LogprobResult":
        if drawn_from:
            logprobs = log_probs_within(logprobs, **drawn_from)
        return compute_logprobs(self, logprobs, *args, **more)

    def draw_with(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None, **more: Any
    ) -> Tensor:
        if sampling_seed is None or positions is None or more:
            return draw(probs, sampling_seed, positions, **more)
        return draw_by_seed(probs, sampling_seed, positions).to(torch.int32)

    def draw_limited_with(
        probs: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        need_min_p_sampling: bool,
        sampling_seed: Tensor | None,
        positions: Tensor,
        *,
        return_filtered_probs: bool = False,
        max_top_k: int | None = None,
        **more: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if sampling_seed is None or return_filtered_probs or more:
            more |= {"return_filtered_probs": return_filtered_probs, "max_top_k": max_top_k}
            return draw_limited(probs, top_ks, top_ps, min_ps, need_min_p_sampling, None, positions, **more)
        kept = keep_likely(probs, top_ks, top_ps, min_ps)
        is_limited = (top_ks < probs.shape[1]) | (top_ps < 1) | (min_ps > 0)
        rows = (is_limited & (top_ks > 1)).nonzero()[:, 0]  # top_k = 1 is SGLang's form of greedy decoding
        drawn_from.update(kept=kept, rows=rows)
        return draw_by_seed(kept, sampling_seed, positions).to(torch.int32)

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)  # type: ignore[arg-type]
    sampler.Sampler.__init__ = init_exact
    sampler.Sampler.forward = forward_of_step
    OutputLogprobProcessor.compute_logprobs = compute_within
    sampler.sampling_from_probs_torch = draw_with
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_limited_with


def _seed_of(request: "Req") -> int:
    seed = request.sampling_params.sampling_seed
    if seed is None:
        return int.from_bytes(hashlib.blake2b(request.rid.encode(), digest_size=8).digest(), signed=True)
    return int(seed)


def choose_products() -> None:
    """Compute the products of layers that are not quantized on blocks of rows, on a CPU.

    Versions: 0.5.21 to 0.5.23. The attention of a CPU looks at one request at a time already. Remove when SGLang's
    batch-invariant mode works on a CPU.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if get_device_name() != "cpu":
        return
    apply_linear = UnquantizedLinearMethod.apply
    compute_lm_head = LogitsProcessor._compute_lm_head

    def apply_on_blocks(
        self: UnquantizedLinearMethod, layer: "LinearBase", x: Tensor, bias: Tensor | None = None, **more: Any
    ) -> Tensor:
        return apply_linear(self, layer, x, bias, **more) if more else product_on_blocks(x, layer.weight, bias)

    def compute_on_blocks(
        self: LogitsProcessor,
        hidden_states: Tensor,
        lm_head: "VocabParallelEmbedding",
        embedding_bias: Tensor | None = None,
        *,
        # Memory that the result may take; it is not used, since blocks are joined in new memory.
        out: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        return on_blocks(lambda block: compute_lm_head(self, block, lm_head, embedding_bias, **more), hidden_states)

    if not has_sglang_kernels():  # SGLang's kernels pack the weights
        UnquantizedLinearMethod.apply = apply_on_blocks
        LogitsProcessor._compute_lm_head = compute_on_blocks
        fused_moe_native.F = SimpleNamespace(linear=product_on_blocks, silu=F.silu, gelu=F.gelu)


def skip_experts_of_others() -> None:
    """Let a rank with some of the experts compute nothing for tokens that go to others, on a CPU without kernels.

    Versions: 0.5.21 to 0.5.23, whose experts in torch take the number -1 of an expert elsewhere for an index. Remove
    when they do not.
    """
    from sglang.srt.layers.moe import fused_moe_native

    if get_device_name() != "cpu":
        return
    compute = fused_moe_native.moe_forward_native

    def compute_own(
        layer: torch.nn.Module,
        x: Tensor,
        topk_output: "StandardTopKOutput",
        moe_runner_config: "MoeRunnerConfig",
        **more: Any,
    ) -> Tensor:
        experts = topk_output.topk_ids
        elsewhere = experts < 0
        if not elsewhere.any():
            return compute(layer, x, topk_output, moe_runner_config, **more)
        ones = topk_output._replace(  # one expert for each row, since SGLang counts an expert once in a row
            topk_ids=experts.masked_fill(elsewhere, 0).reshape(-1, 1),
            topk_weights=topk_output.topk_weights.masked_fill(elsewhere, 0.0).reshape(-1, 1),
        )
        rows = x.repeat_interleave(experts.shape[1], dim=0)
        of_each = compute(layer, rows, ones, moe_runner_config, **more)
        return of_each.reshape(len(x), -1, x.shape[-1]).sum(dim=1)

    fused_moe_native.moe_forward_native = compute_own


def standardize_towers() -> None:
    """Let transformers complete the configs of towers, whose positions have two axes.

    Versions: 0.5.21, whose import lets transformers skip each config without ``max_position_embeddings``, so that it
    builds no vision-language model. Remove with the support of 0.5.21.
    """
    from transformers import PretrainedConfig

    skipping = getattr(PretrainedConfig, "standardize_rope_params", None)
    if installed_version("sglang") != "0.5.21" or skipping is None or skipping.__name__ != "_safe_standardize":
        return
    (original,) = (cell.cell_contents for cell in skipping.__closure__)

    def standardize(self: PretrainedConfig, **more: Any) -> None:
        try:
            original(self, **more)
        except AttributeError as error:
            if "max_position_embeddings" not in str(error):
                raise

    PretrainedConfig.standardize_rope_params = standardize  # type: ignore[assignment, method-assign]


@contextmanager
def sockets_in(folder: Path, opened: "list[Socket[bytes]]") -> Iterator[None]:
    """Let an engine that starts inside the context make the sockets between its processes in a folder.

    ``opened`` gets the sockets of this process. The code that starts the engine closes them: SGLang never does. If
    Python collects them open, the owner of the engine waits without end, since their context may be collected first.

    Versions: 0.5.21 to 0.5.23, which make them among all temporary files, and leave them there. Remove when an engine
    has a folder for them, and closes them when it ends or does not start.
    """
    from sglang.srt import server_args
    from sglang.srt.utils import network

    config_socket = network.config_socket

    def config_noted(socket: "Socket[bytes]", *args: Any, **more: Any) -> None:
        opened.append(socket)
        config_socket(socket, *args, **more)

    class Sockets:
        @staticmethod
        def NamedTemporaryFile(*args: Any, **options: Any) -> "_TemporaryFileWrapper[bytes]":
            return tempfile.NamedTemporaryFile(*args, **{"dir": folder} | options)

    server_args.tempfile = Sockets
    network.config_socket = config_noted
    try:
        yield
    finally:
        server_args.tempfile = tempfile
        network.config_socket = config_socket


def answer_aborted() -> None:
    """Return the tokens so far of a request that is aborted while the engine is paused.

    Versions: 0.5.21 to 0.5.23. A pause puts running requests back into the queue, and SGLang answers the abort of a
    request in the queue without the tokens that it has. Remove when the answer has them.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import Scheduler

    abort_request = Scheduler.abort_request

    def answer_and_abort(self: Scheduler, request: "AbortReq", **more: Any) -> None:
        begun = [
            each
            for each in self.waiting_queue
            if each.output_ids and (request.abort_all or each.rid.startswith(request.rid))
        ]
        for each in begun:
            self.waiting_queue.remove(each)
            self._release_aborted_request(each)
            each.finished_reason = FINISH_ABORT("Abort in waiting queue")
            self.output_streamer.stream_output([each], each.return_logprob)
        return abort_request(self, request, **more)

    Scheduler.abort_request = answer_and_abort


def sleep_in_pauses() -> None:
    """Let a scheduler with ``sleep_on_idle`` wait for the next message in a pause too.

    Versions: 0.5.21 to 0.5.23, which ask for messages without end in a pause. Remove when they wait.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record_state = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Scheduler, **more: Any) -> None:
        record_state(self, **more)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def end_at_own_tokens() -> None:
    """Let a request with ``ignore_eos`` end at its ``stop_token_ids``, and not at the end tokens of the model's folder.

    Versions: 0.5.21 to 0.5.23, where such a request ignores both. The batch says what ends a response. Remove when
    the end tokens of the folder can be ignored alone.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req

    check = Req._check_token_based_finish

    def check_own(self: Req, new_accepted_tokens: list[int], **more: Any) -> bool:
        if not self.sampling_params.ignore_eos or more:
            return bool(check(self, new_accepted_tokens, **more))
        own = self.sampling_params.stop_token_ids or ()
        for index, token in enumerate(new_accepted_tokens):
            if token in own:
                self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
                self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + index + 1
                return True
        return False

    Req._check_token_based_finish = check_own


def penalise_tokens_of_prompts() -> None:
    """Count the tokens of the prompt in the repetition penalty, as vLLM and transformers do, and those of a retraction.

    Versions: 0.5.21 to 0.5.23, which count the tokens sampled since the request last joined a batch. Remove when they
    count both.
    """
    from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer

    prepare = BatchedRepetitionPenalizer._prepare

    def prepare_with_prompts(self: BatchedRepetitionPenalizer, **more: Any) -> None:
        prepare(self, **more)
        penalties = self.cumulated_repetition_penalties
        for row, request in enumerate(self.orchestrator.reqs()):
            penalty = request.sampling_params.repetition_penalty
            if penalty != 1:
                tokens = {*request.origin_input_ids, *request.output_ids}
                # Larger ids are placeholders of images.
                seen = [token for token in tokens if token < penalties.shape[1]]
                penalties[row, torch.tensor(seen, device=penalties.device)] = penalty

    BatchedRepetitionPenalizer._prepare = prepare_with_prompts


def bind_no_threads() -> None:
    """Let schedulers on a CPU without SGLang's kernels start, however many there are.

    Versions: 0.5.21 to 0.5.23. They choose the cores of each rank for an operator of the kernel package, refuse more
    ranks than the machine has NUMA nodes, and without the package do not bind threads after all. Remove when they ask
    first whether they will.
    """
    from sglang.srt.utils import numa_utils

    if not has_sglang_kernels():
        bind = numa_utils.init_threads_binding

        def bind_none(*, numa_index: int, world_size: int, **more: Any) -> None:
            if more:
                bind(numa_index=numa_index, world_size=world_size, **more)

        numa_utils.init_threads_binding = bind_none


CALL = "verl:"
"""The beginning of the actions of SGLang's ``check_weights`` that are calls of ours."""


def answer_calls(
    serve: "Callable[[SchedulerWeightUpdaterManager, str, JsonObject], ResultT]",
    merge: Callable[[list[ResultT]], ResultT],
) -> None:
    """Let ``serve`` answer calls of ours on all ranks of a scheduler, given a verb and its arguments.

    ``merge`` makes one answer of those of all ranks.

    Versions: 0.5.21 to 0.5.23. SGLang checks nothing that it loads, has no name for one tensor (its
    ``get_weights_by_name`` answers None for stacked projections), and its scheduler dies of an exception in a load.
    ``check_weights`` is the request whose answer carries text. An exception in a call is the answer of that call, from
    whichever rank it comes. Remove when SGLang verifies what it has loaded.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    check_weights = SchedulerWeightUpdaterManager.check_weights

    def check_or_serve(
        self: SchedulerWeightUpdaterManager, request: "CheckWeightsReqInput", **more: Any
    ) -> CheckWeightsReqOutput:
        if more or not request.action.startswith(CALL):
            return check_weights(self, request, **more)
        call = json.loads(request.action.removeprefix(CALL))
        error = result = None
        try:
            result = serve(self, call["verb"], call["arguments"])
        except Exception as failure:  # an exception would end the scheduler
            error = str(failure) if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: {failure}"
        answers: list[Any] = [None] * torch.distributed.get_world_size(group=self.tp_cpu_group)
        torch.distributed.all_gather_object(answers, (error, result), group=self.tp_cpu_group)
        errors = dict.fromkeys(answer[0] for answer in answers if answer[0] is not None)
        message = "; ".join(errors) if errors else json.dumps(merge([answer[1] for answer in answers]))
        return CheckWeightsReqOutput(success=not errors, message=message)

    SchedulerWeightUpdaterManager.check_weights = check_or_serve


def take_encoded_media(manager: "TokenizerManager") -> None:
    """Let requests to a tokenizer manager bring images and videos that a processor has already encoded.

    Versions: 0.5.21 to 0.5.23, whose processors encode a prompt again, and choose pixels and positions by rules of
    their own. ``image_data`` is then one ``MultimodalProcessorOutput``. Remove when requests may hold one.
    """

    if manager.mm_processor is None:
        return
    encode = manager.mm_processor.process_mm_data_async

    async def given(
        image_data: "list[MultimodalProcessorOutput]", *args: Any, **more: Any
    ) -> "MultimodalProcessorOutput":
        inspect.signature(encode).bind(image_data, *args, **more)
        return image_data[0]

    manager.mm_processor.process_mm_data_async = given


def see_frame_by_frame() -> None:
    """Let each patch of a video attend to its own frame in the tower of Qwen2.5-VL, as transformers does.

    Versions: 0.5.21 to 0.5.23, whose layers of full attention attend over all frames. Remove when they do not.
    """
    from sglang.srt.models.qwen2_5_vl import Qwen2_5_VisionTransformer

    forward = Qwen2_5_VisionTransformer.forward

    def forward_frames(self: Qwen2_5_VisionTransformer, x: Tensor, grid_thw: Tensor, **more: Any) -> Tensor:
        grids = torch.repeat_interleave(grid_thw, grid_thw[:, 0], dim=0)
        grids[:, 0] = 1
        frames: Tensor = forward(self, x, grids, **more)
        return frames

    Qwen2_5_VisionTransformer.forward = forward_frames


def name_channels() -> None:
    """Give the configuration of Qwen2-VL's tower the name ``in_chans``, which files that transformers 5 writes lack.

    Versions: 0.5.21 to 0.5.23, which read it. Remove when they read ``in_channels``.
    """
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    if "in_chans" not in Qwen2VLVisionConfig.__dict__:
        Qwen2VLVisionConfig.attribute_map = {**Qwen2VLVisionConfig.attribute_map, "in_chans": "in_channels"}


def forget_images() -> None:
    """Drop the outputs of the vision tower that a scheduler keeps, when the weights have changed.

    Versions: 0.5.21 to 0.5.23, whose ``flush_cache`` keeps them. Remove when it does not.
    """
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
