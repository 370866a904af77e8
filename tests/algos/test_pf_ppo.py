"""Policy filtration: weights by hand, and rows that stay whole."""

import numpy as np
import pytest
import torch

from verl.algos.advantage import pf_ppo_weights
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

SCORES = torch.tensor([0.0, -2.0, 1.0, 1.0])


@pytest.mark.parametrize("method, want", [("pow", [1e-8, 8.0, 1.0, 1.0]), ("max_min", [1e-8, 1.0, 1.0, 1.0]),
                                          ("max_random", [0.1, 0.1, 0.4, 0.4])])  # fmt: skip
def test_weights(method, want):
    torch.testing.assert_close(pf_ppo_weights(SCORES, method, 3.0), torch.tensor(want))


def test_rows_are_drawn_whole():
    count = 2000
    data = DataProto.from_dict(
        tensors={"token_level_scores": SCORES.repeat(count // 4).unsqueeze(-1), "row": torch.arange(count)},
        non_tensors={"name": np.array([f"r{i}" for i in range(count)], dtype=object)},
        meta_info={"global_token_num": list(range(count)), "temperature": 1.0, "other": [1, 2]},
    )
    drawn = compute_pf_ppo_reweight_data(data, "pow", 2.0, generator=torch.Generator().manual_seed(0))
    rows = drawn.batch["row"].tolist()
    assert len(drawn) == count and len(set(rows)) < count
    assert drawn.non_tensor_batch["name"].tolist() == [f"r{i}" for i in rows]
    assert drawn.meta_info == {"global_token_num": rows, "temperature": 1.0, "other": [1, 2]}
    share = sum(row % 4 == 1 for row in rows) / count
    assert share == pytest.approx(4 / 6, abs=0.04)  # weights 0, 4, 1, 1
    with pytest.raises(ValueError, match=r"pf_ppo\.reweight_method"):
        compute_pf_ppo_reweight_data(data, "min")
