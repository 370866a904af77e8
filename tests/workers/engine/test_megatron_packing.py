"""The parts of packed rows that ranks hold: together they are the rows, each position once, in zigzag order."""

import pytest
import torch

from tests.workers.engine import cases, sharing_cases
from verl.protocol import DataProto
from verl.workers.engine.passes import pack_rows, pack_shared_rows

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")


@pytest.mark.parametrize(("cp_size", "tp_multiple"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_every_position_is_held_once(cp_size: int, tp_multiple: int) -> None:
    from verl.workers.engine.megatron.forward import share_of

    packed = pack_rows(DataProto.from_dict(cases.tensors()))
    shares = [share_of(packed, cp_size, rank, tp_multiple) for rank in range(cp_size)]
    targets = torch.cat([share.target for share in shares])
    assert sorted(targets.tolist()) == sorted(packed.target.tolist())
    for share in shares:
        width = share.input_ids.shape[1]
        assert width * cp_size == sum(share.lengths) and width % tp_multiple == 0
        assert cp_size == 1 or all(length % (2 * cp_size) == 0 for length in share.lengths)
        for place, label, target in zip(share.keep, share.labels, share.target, strict=True):
            (at,) = (packed.target == target).nonzero().squeeze(1).tolist()
            assert label == packed.labels[at] and share.input_ids[0, place] == packed.input_ids[0, packed.keep[at]]


@pytest.mark.parametrize("samples", [2, 3])
def test_equal_rows_read_a_token_once(samples: int) -> None:
    """Sequence parallelism pads an odd number of distinct tokens; labels stay fewer than targets."""
    from verl.workers.engine.megatron.forward import share_of

    packed = pack_shared_rows(sharing_cases.padded([list(range(3, 12))] * samples, [list(range(12, 22))] * samples))
    share = share_of(packed, 1, 0, 2)
    assert packed.input_ids.numel() == 19 and share.input_ids.numel() == sum(share.lengths) == 20
    assert share.labels.tolist() == list(range(12, 22)) and len(share.target) == 10 * samples
    assert share.readers is not None and share.labels[share.readers].tolist() == list(range(12, 22)) * samples
    assert share.input_ids[0, share.keep].tolist() == list(range(11, 21))


def test_zigzag_of_one_sequence() -> None:
    """Rank 0 of 2 holds the first and the last quarter of an aligned sequence, rank 1 what is between."""
    from verl.workers.engine.megatron.forward import share_of

    ids = torch.arange(10, 17).unsqueeze(0)
    ones, asked = torch.ones_like(ids), torch.zeros(1, 3, dtype=torch.long)
    rows = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1, "response_mask": asked}
    packed = pack_rows(DataProto.from_dict(rows))
    assert [share_of(packed, 2, rank, 1).input_ids[0].tolist() for rank in (0, 1)] == [
        [10, 11, 16, 0],
        [12, 13, 14, 15],
    ]
    assert share_of(packed, 2, 0, 1).keep.tolist() == [0]  # nothing is asked
