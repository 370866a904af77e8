"""Exchange batches between the ranks of a process group."""

import numpy as np
import torch.distributed as dist
from tensordict import TensorDict

from verl.protocol.data_proto import DataProto, concat_arrays, concat_entries
from verl.utils.device import get_device_id
from verl.utils.tensordict_utils import all_gather_rows


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Give every rank the rows of all ranks in rank order, in place; collective. Row counts may differ."""
    empty: dict[str, np.ndarray] = {}
    # The collective replaces these entries by the count and the arrays of each rank.
    parts = [(0, empty)] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, (len(data), data.non_tensor_batch), group=process_group)
    counts = [count for count, _ in parts]
    if data.batch is not None:
        home = data.batch.device
        # Each column is a collective, so all ranks must take them in the same order, however they were added to the
        # batch. NCCL reads tensors on its device only; the result goes back to the device of the column.
        tensors = {
            key: all_gather_rows(data.batch[key].to(get_device_id()), counts, process_group).to(data.batch[key].device)
            for key in sorted(data.batch.keys())
        }
        data.batch = TensorDict(tensors, batch_size=[sum(counts)], device=home)
    data.non_tensor_batch = concat_entries([arrays for _, arrays in parts], concat_arrays)
