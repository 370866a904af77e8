"""All patches of vLLM, with the versions that need them and the condition for their removal.

They were written for and tested with vLLM 0.32; the patched classes exist since 0.25. Each patch is applied once per
process.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.utils import envs
from verl.utils.numerics.blocks import product_on_blocks


@cache
def apply(on_cpu: bool) -> None:
    """Apply the patches for the device."""
    quiet_reload()
    if on_cpu:
        permit_amx()
        keep_plain_weights()
        draw_seeds_by_counter()


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

    Versions: 0.25 to 0.32. A packed weight cannot be read back for verification, and a tied output layer keeps the
    packed copy of the old weight after a reload. The patch costs about a tenth of generation speed at hidden size 256.
    Remove when packed weights are readable and a reload packs tied layers again.
    """
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        if "cpu_linear" not in vars(layer):  # a reload of the weights asks again
            layer.cpu_linear = _product  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = keep


_product: Callable[..., Tensor] = torch.nn.functional.linear


def choose_products(batch_invariant: bool) -> None:
    """Choose the matrix product of the engines on a CPU that start from now on.

    Versions: 0.25 to 0.32. Remove when ``VLLM_BATCH_INVARIANT`` works on a CPU.
    """
    global _product
    _product = product_on_blocks if batch_invariant else torch.nn.functional.linear


def patch_vllm_moe_model_weight_loader(model: torch.nn.Module) -> None:
    """Give the stacked weights of experts the loader of their layer, where they have none.

    Versions: 0.8.2 and later, for forks that load weights into vLLM by themselves: a parameter that was replaced, as by
    quantization or offloading, has lost its ``weight_loader``, and ``load_weights`` then copies an expert over all of
    them or fails. Remove when ``load_weights`` takes the loader from the layer.
    """
    for module in model.modules():
        loader = getattr(module, "weight_loader", None)
        for name, parameter in module.named_parameters(recurse=False) if callable(loader) else ():
            if name.startswith(_STACKED) and not hasattr(parameter, "weight_loader"):
                parameter.weight_loader = loader  # type: ignore[attr-defined]


_STACKED = ("w13_weight", "w2_weight")
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

    Versions: 0.32 on a CPU. There a seeded request fails when its prompt is prefilled in chunks ("CPU Generator does
    not use offset"), every step draws from torch's global generator even if no request needs it, and a Python loop
    calls ``torch.randint`` once per token. Remove when vLLM samples on the CPU by (seed, position).
    """
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    update_states = CPUModelRunner._update_states
    forward_cpu = topk_topp_sampler.TopKTopPSampler.forward_cpu

    def update_states_with_streams(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            state = self.requests[request.req_id]
            if isinstance(state.generator, torch.Generator):
                state.generator = SeedStream(request.sampling_params.seed)
                self.input_batch.generators[self.input_batch.req_id_to_index[request.req_id]] = state.generator
        return result

    def forward(
        self: Any, logits: Tensor, generators: dict[int, SeedStream], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.use_fp64_gumbel:
            plain = {row: torch.Generator().manual_seed(stream.draw()) for row, stream in generators.items()}
            return forward_cpu(self, logits, plain, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p).to(torch.float32)
        rows = logits.shape[0]
        seeds = torch.randint(0, 2**31, (rows,)) if len(generators) < rows else torch.empty(rows, dtype=torch.long)
        for row, stream in generators.items():  # greedy requests have none, and do not change those of others
            seeds[row] = stream.draw()
        processed = {"processed_logits": lambda: logits, "processed_logprobs": lambda: logits.log_softmax(dim=-1)}
        wanted = processed[self.logprobs_mode]() if self.logprobs_mode in processed else None
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), wanted

    CPUModelRunner._update_states = update_states_with_streams
    topk_topp_sampler.TopKTopPSampler.forward_cpu = forward


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
    ExecutorWithExternalLauncher._distributed_args = lambda self: (f"tcp://127.0.0.1:{token}", rank, local_rank)


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


def _ring_buffers() -> Iterator[Any]:
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        queue = getattr(reference(), "mq_broadcaster", None)
        if getattr(queue, "buffer", None) is not None:
            yield queue.buffer


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
            texts.append(path.read_text())
    return "\n".join(texts)
