"""What a weight sync allocates, by the events of torch's allocator: FSDP's shards into a rollout that keeps none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.sharding_manager import weight_sync
from verl.workers.sharding_manager.weight_sync import WeightSync

MIB = 1 << 20


class Taker:
    """A rollout that takes buckets and drops them; it may look at all tensors, and hold some back."""

    unverified = 0
    dtype: torch.dtype | None = None

    def __init__(self, looks: bool = False, pending: Callable[[str], bool] = lambda name: False) -> None:
        self.looks, self.holds = looks, pending
        self.held: list[Tensor] = []
        self.checksums: dict[str, Tensor] = {}
        self.tensors = 0

    @property
    def pending_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held)

    def begin_update(self) -> None:
        pass

    def load(self, bucket: list[tuple[str, Tensor]]) -> None:
        self.tensors += len(bucket)
        for name, tensor in bucket:
            if self.holds(name):
                self.held.append(tensor)
            elif self.held:  # the layer is whole
                self.held.clear()

    def finish_update(self, version: int) -> None:
        self.held.clear()

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        if not self.looks:
            return None
        self.checksums[name] = tensor_checksum(tensor)
        return name, self.checksums[name]

    def weight_dtype(self, name: str) -> torch.dtype | None:
        return self.dtype

    def weights_checksum(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.checksums.items()}


@pytest.fixture(scope="module")
def engine() -> Iterator[FSDPEngine]:
    """A model of 265 MiB whose largest tensors have 8 MiB, sharded over two ranks, of which the other is none."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        num_hidden_layers=17,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2048,
        tie_word_embeddings=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.workers.engine.fsdp.layout.take_over_timeout", lambda mesh: None)  # a stand-in has none
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(config)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            settings = FSDPEngineConfig(strategy="fsdp2")
            yield FSDPEngine.from_module(model, None, remove_padding=False, engine_config=settings)
        finally:
            torch.distributed.destroy_process_group()


@contextmanager
def allocations() -> Iterator[dict[str, int]]:
    """Fill in the most bytes that were allocated at once since the begin, and those that are left at the end."""
    found: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns())
    sums = torch.tensor([each.nbytes() for each in memory]).cumsum(0)
    found.update(peak=int(sums.max()), left=int(sums[-1]), events=len(sums))


@pytest.mark.parametrize(("bucket", "looks"), [(8, False), (16, False), (32, False), (8, True)])
def test_the_stream_stays_below_two_buckets(engine: FSDPEngine, bucket: int, looks: bool) -> None:
    """The tensors of one bucket, to the byte; a checksum reads them in small pieces."""
    parameters = list(engine.module.parameters())
    assert max(parameter.nbytes for parameter in parameters) <= bucket * MIB
    rollout = Taker(looks)
    with allocations() as found:
        sync = WeightSync(engine, rollout, bucket * MIB, step=1).run()
    assert rollout.tensors == sync["tensors"] == len(parameters) and sync["buckets"] >= 8
    assert sync["bytes"] == sum(parameter.nbytes for parameter in parameters)
    assert sync["peak_bytes"] <= bucket * MIB
    small = 4 * MIB if looks else 4096
    assert sync["peak_bytes"] <= found["peak"] <= sync["peak_bytes"] + small < 2 * bucket * MIB
    assert found["left"] <= 4096 and found["events"] > 2 * len(parameters)


def test_freed_memory_is_returned_after_each_bucket(engine: FSDPEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(weight_sync, "return_freed_host_memory_if_short", lambda: returned.append(True))
    sync = WeightSync(engine, Taker(), 32 * MIB, step=1).run()
    assert sync["buckets"] == len(returned) > 2


@pytest.mark.parametrize("bucket", [8, 32])
def test_what_the_engine_holds_back_is_counted(engine: FSDPEngine, bucket: int) -> None:
    """As vLLM does with gate until up comes: they and the stream together are a bucket."""
    with allocations() as found:
        sync = WeightSync(engine, Taker(pending=lambda name: "gate_proj" in name), bucket * MIB, step=1).run()
    assert sync["checksum_ok"] == 1 and found["peak"] <= bucket * MIB + 4096


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the floating-point tensors that ranks exchange."""

    def __enter__(self) -> Any:
        self.nbytes = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
            self.nbytes += sum(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (None, 4)])
def test_weights_travel_in_the_dtype_of_the_engine(engine: FSDPEngine, dtype: torch.dtype | None, size: int) -> None:
    """Bytes per parameter: those that the ranks exchange, those of the buckets, and what is allocated."""
    rollout = Taker()
    rollout.dtype = dtype
    with Sent() as sent:  # type: ignore[no-untyped-call]
        sync = WeightSync(engine, rollout, 8 * MIB, step=1).run()
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    assert sync["bytes"] == sent.nbytes == size * parameters
    with allocations() as found:
        WeightSync(engine, rollout, 8 * MIB, step=1).run()
    assert found["peak"] <= 8 * MIB + (4 * MIB if size == 2 else 4096)  # a rank's shard in the other dtype


def test_an_engine_whose_ranks_differ_gets_whole_weights(engine: FSDPEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one rank of the engine holds a layer, and another does not."""
    rollout = Taker()
    rollout.dtype = torch.bfloat16
    reduce = torch.distributed.all_reduce

    def with_another(tensor: Tensor, *options: Any) -> None:
        reduce(tensor, *options)
        if tensor.dim() == 2:
            tensor[:, 0].copy_(torch.tensor([2, 0]))  # the other rank does not know the first

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another)
    sync = WeightSync(engine, rollout, 8 * MIB, step=1).run()
    first, *others = (parameter.numel() for parameter in engine.module.parameters())
    assert sync["bytes"] == 4 * first + 2 * sum(others)
