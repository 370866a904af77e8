"""Code that runs in the processes of a server's engine: our patches, and the receiver of weights.

vLLM imports this module there by ``worker_extension_cls``, before it loads the model. No other code imports this
module, because its import changes the process.
"""

import ctypes
import dataclasses
import logging
import signal
from typing import TYPE_CHECKING

import torch

from verl.utils import envs
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.vllm_rollout.engine_args import INVARIANT_VARIABLE, WEIGHT_BACKEND
from verl.workers.rollout.vllm_rollout.importing import import_vllm
from verl.workers.rollout.vllm_rollout.media import use_training_positions
from verl.workers.rollout.vllm_rollout.sockets import in_folder
from verl.workers.rollout.vllm_rollout.weights import EngineWeights
from verl.workers.rollout.weight_channel import Layout, Received, Rendezvous, WeightGroup, name_of, read_shared

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Let this process die with its parent; vLLM's engine would outlive a server that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_end_with_parent()
import_vllm(batch_invariant=envs.flag(INVARIANT_VARIABLE))

from vllm.distributed.weight_transfer import base, factory  # noqa: E402 (the environment comes first)


@dataclasses.dataclass
class Connection(base.WeightTransferInitInfo):
    """The group in which buckets arrive."""

    host: str
    port: int
    size: int
    backend: str
    timeout_s: float


@dataclasses.dataclass
class Arrival(base.WeightTransferUpdateInfo):
    """A bucket of weights: its layout and the shared memory that holds it; without a path, the group broadcasts it."""

    layout: Layout
    path: str | None = None


class WeightReceiver(base.WeightTransferEngine[Connection, Arrival]):
    """Loads the weights of the trainer into a worker of the engine, completely or not at all.

    ``received`` holds the checksums of the received tensors. After the load the engine's weights are read back and
    compared with them.
    """

    init_info_cls = Connection
    update_info_cls = Arrival

    def __init__(
        self, config: "WeightTransferConfig", vllm_config: "VllmConfig", device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        use_training_positions(model, vllm_config.model_config.hf_config)
        self._device = torch.device(device)
        is_unread = vllm_config.load_config.load_format == "dummy"
        self._weights = EngineWeights(model, vllm_config.model_config, self._device, is_unread)
        self._group: WeightGroup | None = None
        self._expected: dict[str, torch.Tensor] = {}
        self._received: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Join the group of the trainer and this engine's workers."""
        parallel = self.vllm_config.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = None  # dropping the old group closes the connection to a sender that is gone
        self._group = WeightGroup(Rendezvous(**dataclasses.asdict(init_info)), rank, self._device)

    def start_weight_update(self) -> None:
        """Open the model."""
        self._expected.clear()
        self._received.clear()
        self._weights.begin()

    def receive_weights(self, update_info: Arrival) -> None:
        """Load the next bucket.

        Raises: RuntimeError naming a tensor that the model lacks.
        """
        if update_info.path is not None:
            bucket = read_shared(update_info.path, update_info.layout, self._device)
        else:
            assert self._group is not None, "connect comes before the first bucket"
            bucket = self._group.receive(update_info.layout)
        for name, tensor in bucket:
            self._received[name] = tensor_checksum(tensor)
            due = self._weights.checksum_of_source(name, tensor)
            if due is not None:
                self._expected[due[0]] = due[1]
        self._weights.load(bucket)

    def finish_weight_update(self) -> None:
        """Close the model, and compare its weights with those that arrived.

        Raises: RuntimeError naming tensors that are missing or differ.
        """
        self._weights.finish()
        found = self._weights.checksums()
        due = {name: int(value) for name, value in self._expected.items()}
        wrong = [name for name, value in due.items() if found.get(name) != value]
        if wrong:
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise RuntimeError(f"{len(wrong)} of {len(due)} tensors in the engine differ from what arrived: {shown}")

    def abort(self) -> None:
        """Drop the tensors received so far."""
        self._weights.abort()

    @property
    def received(self) -> dict[str, int]:
        """The checksum of each tensor that arrived in the last update."""
        return {name: int(value) for name, value in self._received.items()}

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of the parameter that took each tensor by a plain copy; None for a tensor that was not copied."""
        return {name: name_of(self._weights.dtype_of(name)) for name in self._received}

    @property
    def unverified(self) -> int:
        """The number of tensors that arrived and cannot be found in the engine."""
        return len(self._received) - len(self._expected)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


if WEIGHT_BACKEND not in factory.WeightTransferEngineFactory._registry:
    factory.WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, WeightReceiver)


class WorkerExtension:
    """Methods that a worker of the engine has besides vLLM's own; the server calls them by ``collective_rpc``."""

    weight_transfer_engine: WeightReceiver
    _weight_update_active: bool

    @property
    def distributed_init_method(self) -> str:
        """The address at which the workers of the engine meet; vLLM sets it."""
        return self._address

    @distributed_init_method.setter
    def distributed_init_method(self, address: str) -> None:
        self._address = in_folder(address)

    def verl_abort_update(self) -> None:
        """End a failed update; the next update may start."""
        self._weight_update_active = False
        self.weight_transfer_engine.abort()

    def verl_received(self) -> Received:
        """Return checksums and dtypes of the tensors of the last update, and how many could not be read back."""
        receiver = self.weight_transfer_engine
        return {"checksums": receiver.received, "unverified": receiver.unverified, "dtypes": receiver.dtypes}
