"""What reduces or gathers over ranks, on two processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import spawn_ranks
from tests.utils.test_fsdp_utils import check_two_ranks, write
from verl.utils import torch_functional as VF
from verl.utils.fsdp_utils import full_tensor
from verl.utils.profiler import reduce_timing, topk_reduce_ratio_min_max
from verl.utils.seqlen_balancing import rearrange_micro_batches

LENGTHS = [[4, 4, 4, 4], [9, 8, 7, 9]]
VALUES = [[1.0, 2.0, 6.0], [3.0, -4.0, 0.5]]


def check_statistics(rank):
    local, everything = torch.tensor(VALUES[rank]), np.array(VALUES).ravel()
    got = VF.distributed_mean_max_min_std(local.clone())
    want = (everything.mean(), everything.max(), everything.min(), everything.std(ddof=1))
    np.testing.assert_allclose([x.item() for x in got], want, rtol=1e-6)
    assert VF.distributed_mean_max_min_std(local, False, False, False)[1:] == (None, None, None)
    mask = torch.tensor([1, 0, 1 - rank])
    dirty = local.masked_fill(mask == 0, torch.nan)
    assert VF.distributed_masked_mean(dirty, mask).item() == np.float32((1 + 6 + 3) / 3)


def check_dicts(rank):
    mine = {"b": torch.full((2, 3), float(rank)), "a": torch.tensor([[rank], [rank + 10]])}
    gathered = VF.allgather_dict_tensors(mine, size=2, group=None)
    assert gathered["a"].tolist() == [[0], [10], [1], [11]] and gathered["b"].shape == (4, 3)
    assert VF.allgather_dict_tensors(mine, size=2, group=None, dim=1)["a"].tolist() == [[0, 1], [10, 11]]
    VF.broadcast_dict_tensor(mine, src=1, group=None)
    assert mine["a"].tolist() == [[1], [11]] and mine["b"].eq(1).all()


def check_micro_batches(rank):
    """The rank with fewer tokens makes as many micro-batches as the other, each within the budget."""
    from tensordict import TensorDict

    lengths = LENGTHS[rank]
    mask = (torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)).long()
    batch = TensorDict({"attention_mask": mask}, batch_size=4)
    alone = len(rearrange_micro_batches(batch, 17)[1])
    together, parts = rearrange_micro_batches(batch, 17, dp_group=dist.group.WORLD)
    assert (alone, len(together)) == ([1, 2][rank], 2)
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3]
    assert all(int(m["attention_mask"].sum()) <= 17 for m in together)
    apart, _ = rearrange_micro_batches(batch, 17, dp_group=dist.group.WORLD, same_micro_num_in_dp=False)
    assert len(apart) == alone


def check_whole_tensors(rank):
    """What is gathered by rows equals what was shared out, on every layout of a mesh and for uneven rows."""
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))
        for size, dim in (((4, 3), 0), ((3, 2), 0), ((1, 2), 0), ((5,), 0), ((3, 4), 1), ((0, 2), 0)):
            expected = torch.arange(float(torch.Size(size).numel())).view(size)
            shared = distribute_tensor(expected, mesh, [Replicate(), Shard(dim)])
            assert torch.equal(full_tensor(shared), expected), (shape, size, dim)
            assert torch.equal(full_tensor(distribute_tensor(expected, mesh, [Replicate()] * 2)), expected)


def check_timers(rank):
    timing, ops = {"gen": [1.0, 4.0][rank], "sync": [3.0, 1.0][rank]}, dist.ReduceOp
    assert reduce_timing(timing) == reduce_timing(timing, ops.AVG) == {"gen": 2.5, "sync": 2.0}
    assert reduce_timing(timing, reduce_op=ops.SUM) == {"gen": 5.0, "sync": 4.0}
    assert reduce_timing(timing, ops.MIN) == {"gen": 1.0, "sync": 1.0}
    assert reduce_timing(timing, ops.MAX) == {"gen": 4.0, "sync": 3.0}
    assert topk_reduce_ratio_min_max(timing["gen"]) == (0.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="must be AVG, SUM, MIN or MAX"):
        reduce_timing(timing, ops.PRODUCT)


def run_rank(rank, root, checkpoint):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(root) / 'store'}", rank=rank, world_size=2)
    check_whole_tensors(rank)
    check_statistics(rank)
    check_dicts(rank)
    check_timers(rank)
    check_micro_batches(rank)
    check_two_ranks(rank, Path(root), checkpoint)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    spawn_ranks(run_rank, (str(tmp_path), write(tmp_path)))
