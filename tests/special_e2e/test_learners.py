"""Runs whose sampler or data set learns from each step: an extended run equals one that is not interrupted."""

import pytest

from .conftest import assert_bit_for_bit

CURRICULUM = """
from verl.experimental.dataset.sampler import AbstractCurriculumSampler

class Worst(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.scores = [0.0] * len(data_source)
    def __len__(self):
        return len(self.scores)
    def __iter__(self):
        for place in range(len(self.scores)):
            yield (place * 5 + int(100 * abs(sum(self.scores)))) % len(self.scores)
    def update(self, batch):
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        for info, score in zip(batch.non_tensor_batch["extra_info"], scores):
            self.scores[info["index"]] += score + 0.01
    def state_dict(self):
        return {"scores": self.scores}
    def load_state_dict(self, state):
        self.scores = state["scores"]
"""

GENERATOR = """
import datasets
from verl.experimental.dynamic_dataset.dynamicgen_dataset import AbstractDataGenerator

class Says(AbstractDataGenerator):
    def __init__(self, config):
        super().__init__(config)
        self.calls = 0
    def generate(self, dataset):
        rows = [dict(dataset.dataframe[0]) for _ in range(8)]
        for number, row in enumerate(rows):
            row["prompt"] = [{"role": "user", "content": f"made {self.calls} {number}"}]
        self.calls += 1
        return datasets.Dataset.from_list(rows, features=dataset.dataframe.features)
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]
"""

STEPS = 10  # the 64 rows of the files are gone through after eight
KINDS = {
    "curriculum": (CURRICULUM, {"data.sampler.class_path": None, "data.sampler.class_name": "Worst"}),
    "generated": (GENERATOR, {"data.datagen.path": None, "data.datagen.name": "Says"}),
}


@pytest.mark.full
@pytest.mark.parametrize("module", ["verl.trainer.main_ppo", "recipe.dapo.main_dapo"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_run_equals_an_uninterrupted_one(workspace, kind, module, tmp_path):
    source, keys = KINDS[kind]
    path = tmp_path / "learns.py"
    path.write_text(source)
    options = {key: path if value is None else value for key, value in keys.items()}
    options |= {"trainer.save_freq": 4, "actor_rollout_ref.rollout.name": "hf", "trainer.test_freq": -1}
    name = f"{kind}_{module.rpartition('.')[2]}"
    whole = workspace.train(f"{name}_whole", options | {"trainer.total_training_steps": STEPS}, module=module)
    for steps in (1, 9, STEPS):
        run = workspace.train(name, options | {"trainer.total_training_steps": steps}, module=module)
    assert_bit_for_bit(run, whole, range(1, STEPS + 1))
