"""The weights with which the hf rollout starts, where no trainer sends others: files that lack some are refused."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.workers.rollout import tiny
from verl.workers.config import HFModelConfig
from verl.workers.rollout import build_rollout


def test_files_that_lack_tensors_are_refused(tmp_path: Path) -> None:
    """Not where they are to come from the trainer."""
    trained = tiny.build_model(tied=True)
    trained.save_pretrained(tmp_path)
    model = HFModelConfig(path=str(tmp_path), load_tokenizer=False)
    build_rollout(tiny.rollout_config("hf", load_format="auto"), model, engine=None)  # the tied head is in no file
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if ".layers.1.mlp" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    lacking = r"the files lack 3 tensors of the model, the first is 'model\.layers\.1\.mlp\.down_proj\.weight'"
    with pytest.raises(ValueError, match=lacking):
        build_rollout(tiny.rollout_config("hf", load_format="auto"), model, engine=None)
    build_rollout(tiny.rollout_config("hf", load_format="dummy"), model, tiny.TrainerStandIn(trained))
