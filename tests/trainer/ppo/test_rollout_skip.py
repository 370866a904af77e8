"""Rollouts that are kept in files: established constructor and layout, per step, and only for their own prompts."""

import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf

from verl.errors import UntrustedClassError
from verl.utils.rollout_skip import DataProto, RolloutSkip


def test_rollouts_are_kept_per_step_and_prompts(tmp_path):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": 2, "skip_dump_dir": str(tmp_path)}},
            "data": {"train_batch_size": 1},
            "trainer": {"experiment_name": "e", "project_name": "p"},
        }
    )
    calls = []

    def generate(prompts):
        calls.append(prompts.meta_info["global_steps"])
        answer = torch.full((len(prompts), 1), len(calls))
        return DataProto.from_dict({"prompts": prompts.batch["input_ids"], "responses": answer})

    def ask(token, step, **meta):
        group = SimpleNamespace(generate_sequences=generate)
        RolloutSkip(config, group).wrap_generate_sequences()
        prompts = DataProto.from_dict({"input_ids": torch.tensor([[token], [token]])})
        prompts.meta_info = {"global_steps": step, **meta}
        return group.generate_sequences(prompts).batch["responses"][0].item()

    assert ask(5, 1) == 1 and ask(5, 1) == 1 and ask(5, 2) == 1 and calls == [1]  # the prompts of step 1 again
    assert ask(7, 2) == 2 and ask(7, 2) == 2 and ask(7, 2, first_prompt=3) == 3
    assert ask(6, 1) == 4 and ask(6, 1) == 4  # other prompts: made again, and kept as well
    assert ask(6, 1, validate=True) == 5 and ask(6, 1, do_sample=False) == 6  # never taken from a file
    names = ["e_p_GBS1__N2", "e_p_GBS1__N2_step1", "e_p_GBS1__N2_step2", "e_p_GBS1__N2_step2_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    kept = tmp_path / "e_p_GBS1__N2_step1"
    kept.write_bytes(b"cut")
    assert ask(6, 1) == 7
    kept.write_bytes(pickle.dumps(SimpleNamespace(batch=1)))
    with pytest.raises(UntrustedClassError, match=rf"{kept} names types\.SimpleNamespace.*trainer\.trusted_classes"):
        ask(6, 1)


@pytest.mark.parametrize(("prompts", "samples"), [(2, 3), (4, 1)])
def test_mappings_as_configuration_and_any_batch(prompts, samples, tmp_path, capsys):
    """As users call the class in tests of their own: nodes are dicts, and the batch may be a stand-in."""
    config = MagicMock()
    config.actor_rollout_ref.rollout = {"n": samples, "skip_dump_dir": str(tmp_path / "dumps")}
    config.data = {"gen_batch_size": prompts, "experiment_name": "exp", "project_name": "run"}
    group = MagicMock()
    group.generate_sequences = lambda batch, **kwargs: DataProto.from_dict(
        {"prompt": torch.rand(prompts * samples, 50), "response": torch.rand(prompts * samples, 100)}
    )
    skip = RolloutSkip(config, group)
    assert (skip.n, skip.gbs, skip._rollout_wg) == (samples, prompts, group)
    assert skip.dumped_dir == tmp_path / "dumps" and skip.try_load() is None
    skip.wrap_generate_sequences()
    assert "Successfully patched" in capsys.readouterr().out
    first = group.generate_sequences(MagicMock())
    assert skip.curr_path_dump == tmp_path / "dumps" / f"exp_run_GBS{prompts}__N{samples}"
    assert "Successfully dump data in" in capsys.readouterr().out
    assert skip.curr_path_dump.stat().st_size >= 150 * prompts * samples * 4
    for _ in range(2):
        assert torch.equal(group.generate_sequences(MagicMock()).batch["response"], first.batch["response"])
        assert "Successfully load pre-generated data from" in capsys.readouterr().out
    assert torch.equal(DataProto.load_from_disk(skip.curr_path_dump).batch["prompt"], first.batch["prompt"])


def test_chosen_steps_and_the_first_rollout_again(tmp_path):
    calls = []

    def ask(token, step, **options):
        rollout = {"n": 1, "skip_dump_dir": str(tmp_path), **options}
        config = OmegaConf.create(
            {"actor_rollout_ref": {"rollout": rollout}, "data": {"train_batch_size": 1}, "trainer": {}}
        )

        def generate(prompts):
            calls.append(step)
            answer = torch.full((1, 1), len(calls))
            return DataProto.from_dict({"prompts": prompts.batch["input_ids"], "responses": answer})

        group = SimpleNamespace(generate_sequences=generate)
        RolloutSkip(config, group).wrap_generate_sequences()
        prompts = DataProto.from_dict({"input_ids": torch.tensor([[token]])}, meta_info={"global_steps": step})
        return group.generate_sequences(prompts).batch["responses"].item()

    assert ask(5, 1, skip_steps=[1]) == 1 and ask(5, 1, skip_steps=[1]) == 1
    assert ask(5, 2, skip_steps=[1]) == 2  # generated, although the file has these prompts
    assert ask(7, 3, skip_action="repeat") == 1 and ask(7, 3) == 3
