"""What a resumed run continues from: the position in the data, the checkpoint folder; and the dumps of a step."""

import copy
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from examples.tiny_model import make_tiny_model
from tests.utils.checkpoint.killed import SAVE, kill_in
from verl.algos.kl import AdaptiveKLController
from verl.errors import UnsupportedInput, WrongInput, WrongSetting
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders, run_records
from verl.trainer.ppo.checkpoint import (
    Checkpoints,
    load_driver_state,
    reference_fields,
    remove_emptied_folders,
    save_driver_state,
)
from verl.trainer.ppo.course import Course
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.trainer.run import resume
from verl.trainer.run.resume import find_resume_folder, read_tracker, tell_replaced
from verl.utils.checkpoint import files, write_tracker_atomically
from verl.utils.checkpoint.files import Manifest, step_folders, write_text
from verl.utils.dataset import loader
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.factory import create_rl_sampler, digest_of, warn_of_other_data
from verl.utils.dataset.files import rows_digest
from verl.utils.observe.record import RunRecord
from verl.workers.config import FSDPRefConfig, HFModelConfig

ROWS, BATCH = 11, 4  # two batches per epoch, three rows left over


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": torch.tensor(index)}


def trainer_at_start(
    total_steps: int, workers: int = 0, epochs: int | None = None, batch_size: int = BATCH
) -> RayPPOTrainer:
    data = {"train_batch_size": batch_size, "dataloader_num_workers": workers, "shuffle": True, "seed": 5}
    options = {"total_epochs": epochs or 1, "total_training_steps": None if epochs else total_steps}
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.run_config = RunConfig.parse(OmegaConf.create({"data": data, "trainer": options}))
    trainer.state = RunState(seed=1, total_steps=total_steps)
    sampler = create_rl_sampler(data, Numbers())
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, Numbers(), None, sampler)
    return trainer


def draw(trainer: RayPPOTrainer, batches: int = 1) -> Iterator[list[list[int]]]:
    """Draw the batches of the remaining steps as ``fit`` does, so many in each step; yields those of a step."""
    rows = trainer._training_rows()
    while not trainer.state.is_last_step:
        trainer.state.begin_step()
        drawn = []
        for _ in range(batches):
            drawn.append(next(rows)["x"].tolist())
            trainer.state.prompts_drawn += BATCH
        yield drawn


# stops in the middle and at the end of an epoch; processes cost seconds: one stop of each kind is enough for them
@pytest.mark.parametrize(
    ("workers", "batches", "stop"),
    [(0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 1, 4), (1, 1, 2), (1, 1, 3), (0, 3, 1), (0, 3, 2)],
)
def test_a_resumed_run_sees_the_rows_that_an_uninterrupted_one_sees(tmp_path, workers, batches, stop):
    whole = list(draw(trainer_at_start(7, workers), batches))
    flat = [rows for step in whole for rows in step]
    assert len(whole) == 7 and sorted(flat[0] + flat[1]) != sorted(flat[2] + flat[3])
    first = trainer_at_start(7, workers)
    seen = []
    for rows in draw(first, batches):
        seen.append(rows)
        if first.global_steps == stop:
            save_driver_state(tmp_path, first.train_dataloader.state_dict(), {"seed": 1, "epoch": first.state.epoch})
            break
    second = trainer_at_start(7, workers)
    state, driver = load_driver_state(tmp_path)
    second.train_dataloader.load_state_dict(state)
    second.state.step = stop
    second.state.epoch = driver["epoch"]
    seen += list(draw(second, batches))
    assert seen == whole
    assert first.state.epoch == driver["epoch"] == (stop * batches - 1) // 2  # two batches an epoch
    assert second.state.epoch == (7 * batches - 1) // 2


LOADER_WITH_TWO_PROCESSES = {
    "_snapshot": {
        "_snapshot_step": 1,
        "_last_yielded_worker_id": 0,
        "_main_snapshot": {
            "_num_workers": 2,
            "_sampler_iter_state": {
                "samples_yielded": 4,
                "sampler_iter_state": {"seed": 5, "epoch": 1, "position": 4, "num_rows": 11, "num_replicas": 1},
            },
            "_index_sampler_state": None,
            "_sampler_iter_yielded": 1,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
            "_base_seed": 4064269471072392264,
        },
        "_worker_snapshots": {
            "worker_0": {"worker_id": 0, "fetcher_state": None, "dataset_state": None},
            "worker_1": {"worker_id": 1, "fetcher_state": None, "dataset_state": None},
        },
    },
    "_steps_since_snapshot": 0,
    "_iterator_finished": False,
}
"""What an older version wrote after three steps, where loaders had as many processes as configured."""


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("workers", [0, 8])
def test_a_checkpoint_of_an_older_version_goes_on_with_the_processes_of_this_machine(
    tmp_path, monkeypatch, caplog, workers, cores
):
    monkeypatch.setattr(loader, "usable_cores", lambda: list(range(cores)))
    save_driver_state(tmp_path, LOADER_WITH_TWO_PROCESSES, {"seed": 1, "epoch": 1})
    trainer = trainer_at_start(7, workers)
    state, driver = load_driver_state(tmp_path)
    trainer.train_dataloader.load_state_dict(state)
    trainer.state.step = 3
    trainer.state.epoch = driver["epoch"]
    assert trainer.train_dataloader.num_workers == min(workers, cores)
    assert caplog.text.count("data.dataloader_num_workers=8") == (workers > cores)
    assert list(draw(trainer)) == [[[9, 2, 7, 8]], [[6, 3, 9, 4]], [[1, 10, 7, 0]], [[7, 10, 1, 2]]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("batch_size", "processes"), [(None, 1), (6, 2), (2, 3)])
def test_loaders_start_no_more_processes_than_they_can_use(monkeypatch, batch_size, processes):
    """The first case is the default: the validation set is one batch."""
    monkeypatch.setattr(loader, "usable_cores", lambda: [0, 1, 2])
    data = DataConfig(val_batch_size=batch_size)
    validation = loaders.validation_loader(data, 1, Numbers(), None)
    assert validation.num_workers == processes
    assert [row for batch in validation for row in batch["x"].tolist()] == list(range(ROWS))


def test_another_batch_size_is_named_and_continues_at_the_next_row(tmp_path, caplog):
    """The state of the loader counts rows: none is repeated or left out."""
    first, second = trainer_at_start(4), trainer_at_start(4, batch_size=3)
    (seen,) = next(draw(first))

    def checkpoints_of_loader(trainer, groups):
        run = replace(trainer.run_config, trainer=replace(trainer.run_config.trainer, default_local_dir=str(tmp_path)))
        return Checkpoints(run, trainer.state, groups, trainer.train_dataloader, KL_CONTROLLER)

    checkpoints_of_loader(first, {"actor": WritingGroup(tmp_path)}).save()
    checkpoints_of_loader(second, {}).load(tmp_path / "global_step_1")
    assert caplog.text.count("data.train_batch_size=3, and was 4 in the checkpoint") == 1
    assert caplog.text.count("data.train_batch_size") == 1
    seen += [row for batch in second.train_dataloader for row in batch["x"].tolist()]
    assert len(seen) == len(set(seen)) == 10  # of 11 rows, in batches of 4, 3 and 3
    caplog.clear()
    checkpoints_of_loader(first, {}).load(tmp_path / "global_step_1")
    assert not caplog.text


def test_a_reference_with_a_model_of_its_own_is_held_to_it(tmp_path):
    """It is in no checkpoint of a worker: the driver remembers what its forward reads."""
    folders = [make_tiny_model(str(tmp_path / name), hidden_size=32, num_layers=1) for name in ("policy", "reference")]

    def checkpoints(groups):
        trainer = trainer_at_start(4)
        run = replace(trainer.run_config, trainer=replace(trainer.run_config.trainer, default_local_dir=str(tmp_path)))
        shared = replace(
            run.actor_rollout_ref,
            model=HFModelConfig(path=folders[0]),
            ref=FSDPRefConfig(model={"path": folders[1]}, log_prob_micro_batch_size_per_gpu=1),
        )
        next(draw(trainer))
        fields = reference_fields(shared)
        return Checkpoints(run, trainer.state, groups, trainer.train_dataloader, KL_CONTROLLER, reference=fields)

    checkpoints({"actor": WritingGroup(tmp_path)}).save()
    checkpoints({}).load(tmp_path / "global_step_1")
    config = Path(folders[1], "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(WrongInput, match="reference: .* rms_norm_eps=0.001, and 1e-06 in"):
        checkpoints({}).load(tmp_path / "global_step_1")


def test_the_data_end_after_the_last_epoch_where_no_number_of_steps_is_given():
    """Steps of three batches of five epochs of two: the third is full with the ninth batch, the fourth has only one."""
    trainer = trainer_at_start(99, epochs=5)
    steps = []
    with pytest.raises(loaders.EndOfDataError, match="were read 5 times"):
        for step in draw(trainer, 3):
            steps.append(step)
    assert (len(steps), trainer.global_steps, trainer.state.prompts_drawn) == (3, 4, BATCH)


def test_every_draw_starts_from_its_own_random_state():
    draws = {}
    for start in (0, 3):
        trainer = trainer_at_start(6)
        trainer.global_steps = start
        rows = trainer._training_rows()
        while not trainer.state.is_last_step:
            trainer.global_steps += 1
            for before in (0, BATCH):
                trainer.state.prompts_drawn = before
                next(rows)
                draws.setdefault((trainer.global_steps, before), []).append(torch.rand(1).item())
    assert all(first == again for (step, _), (first, *others) in draws.items() for again in others)
    assert len({values[0] for values in draws.values()}) == 12
    assert {step for (step, _), values in draws.items() if len(values) == 2} == {4, 5, 6}


# ---- checkpoints


def config_for(root, **trainer) -> RunConfig:
    defaults = {
        "default_local_dir": str(root),
        "resume_mode": "auto",
        "resume_from_path": None,
        "default_hdfs_dir": None,
    }
    tree = {"trainer": defaults | trainer, "critic": {"enable": False}, "algorithm": {"adv_estimator": "grpo"}}
    return RunConfig.parse(OmegaConf.create(tree))


@pytest.fixture
def whole_if_marked(monkeypatch):
    """Stand for the verification of a role's files: a folder is whole when it holds a file ``whole``."""

    def problems(folder, roles):
        missing = [role for role in roles if not (folder / role / "whole").exists()]
        return [f"{role}: a file is missing" for role in missing]

    def complete(root, after_step=-1):
        folders = [folder for step, folder in step_folders(root) if step > after_step]
        return [str(folder) for folder in folders if not problems(folder, ["actor"])]

    monkeypatch.setattr(resume, "find_problems", problems)
    monkeypatch.setattr(resume, "find_misfits", lambda *arguments: [])
    monkeypatch.setattr(resume, "find_untrusted", lambda *arguments: [])
    monkeypatch.setattr(resume, "find_complete_checkpoints", complete)


def make_checkpoint(root, step, whole=True):
    folder = root / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    (folder / ("whole" if whole else "half")).write_text("")
    return folder.parent


def test_a_trainer_saves_without_fit(tmp_path):
    trainer = trainer_at_start(7)
    trainer.run_config = config_for(tmp_path)
    trainer.state.step = 3

    def save_checkpoint(folder, remote, step):
        assert (Path(folder).name, remote, step) == ("actor", None, 3)
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").touch()

    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=save_checkpoint)
    trainer.critic_wg = trainer.ref_policy_wg = trainer.rm_wg = None
    trainer.ref_in_actor = False
    trainer.kl_ctrl_in_reward = SimpleNamespace(state_dict=dict)
    trainer._save_checkpoint()
    assert (tmp_path / "global_step_3" / "data.pt").exists()


def test_where_a_run_resumes_from(tmp_path, whole_if_marked):
    assert find_resume_folder(config_for(tmp_path)) is None  # no checkpoint: from scratch
    make_checkpoint(tmp_path, 10, whole=False)
    assert find_resume_folder(config_for(tmp_path)) is None  # a run that was killed in its first save
    folder = make_checkpoint(tmp_path, 4)
    make_checkpoint(tmp_path, 2)
    with pytest.raises(WrongSetting, match="auto: .*iteration.txt names no checkpoint, but .*global_step_4 ") as caught:
        find_resume_folder(config_for(tmp_path))
    assert f"resume_path trainer.resume_from_path={folder}, or" in str(caught.value)
    assert "trainer.resume_mode=disable" in str(caught.value)
    write_tracker_atomically(tmp_path, 4)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert read_tracker(tmp_path, config_for(tmp_path)) == 4
    assert find_resume_folder(config_for(tmp_path)) == folder
    assert find_resume_folder(config_for(tmp_path, resume_mode="disable")) is None
    other = config_for(tmp_path / "new", resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_2"))
    assert find_resume_folder(other) == tmp_path / "global_step_2"


def test_newer_checkpoints_that_a_run_replaces_are_named_once(tmp_path, whole_if_marked, caplog):
    folders = {step: make_checkpoint(tmp_path, step) for step in (2, 4, 10)}
    make_checkpoint(tmp_path, 12, whole=False)  # a kill in a save leaves one: nothing is lost
    tell_replaced(tmp_path, folders[10])
    tell_replaced(tmp_path / "new", None)
    assert not caplog.records
    tell_replaced(tmp_path, folders[2])
    assert "newer checkpoints (global_step_4, global_step_10): the run starts after step 2" in caplog.text
    tell_replaced(tmp_path, None)
    assert "(global_step_2, global_step_4, global_step_10): the run starts from scratch" in caplog.text
    assert len(caplog.records) == 2


class Killed(BaseException):
    """Stands for the end of a run that no code sees."""


def start_and_die(root, monkeypatch, cuts, **trainer):
    """Start a run, and let it die before or after it ``cuts`` the record of the folder."""

    def open_outputs(options, tree, resumed, total, describe, only_validates):
        if cuts:
            RunRecord(root, resumed)
        raise Killed

    run = RayPPOTrainer.__new__(RayPPOTrainer)
    run.run_config, run.config, run.tokenizer = config_for(root, **trainer), OmegaConf.create({}), None
    run.state = RunState(seed=1, total_steps=20)
    run.checkpoints = Checkpoints(run.run_config, run.state, {}, LOADER, KL_CONTROLLER)
    run.checkpoints.load = lambda folder, delete_after_load: setattr(run.state, "step", 2)
    monkeypatch.setattr(run, "_take_over_changes", lambda: None)
    monkeypatch.setattr(run_records, "RunOutput", open_outputs)
    with pytest.raises(Killed), run._run():
        pass


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("how", ["folder", "relative", "link to it", "it is a link"])
def test_a_run_that_dies_before_its_first_save_goes_on_where_it_has_started(
    tmp_path, whole_if_marked, monkeypatch, how, cuts
):
    """Newer checkpoints are those that its user has decided to replace."""
    root = tmp_path / "run"
    older, _ = make_checkpoint(root, 2), make_checkpoint(root, 10)
    path = older
    if how == "relative":
        monkeypatch.chdir(tmp_path)
        path = Path("run/global_step_2")
    elif how == "link to it":
        path = tmp_path / "global_step_2"
        path.symlink_to(older)
    elif how == "it is a link":
        older.rename(tmp_path / "elsewhere")
        older.symlink_to(tmp_path / "elsewhere")
    write_tracker_atomically(root, 10)
    record = RunRecord(root, None)
    for step in range(1, 13):
        record.log({"x": step}, step)
    start_and_die(root, monkeypatch, cuts, resume_mode="resume_path", resume_from_path=str(path))
    assert find_resume_folder(config_for(root)) == older
    assert sorted(RunRecord(root, 2).steps) == [1, 2]


@pytest.mark.parametrize("start", ["disable", "elsewhere"])
def test_a_run_that_dies_before_its_first_save_leaves_no_step_that_it_has_not_taken(
    tmp_path, whole_if_marked, monkeypatch, start
):
    root = tmp_path / "run"
    newer, other = make_checkpoint(root, 10), make_checkpoint(tmp_path, 2)
    write_tracker_atomically(root, 10)
    given = {"resume_mode": "disable"}
    if start == "elsewhere":
        given = {"resume_mode": "resume_path", "resume_from_path": str(other)}
    start_and_die(root, monkeypatch, False, **given)
    with pytest.raises(WrongSetting, match=f"names no checkpoint, but {newer} is complete"):
        find_resume_folder(config_for(root))
    start_and_die(root, monkeypatch, False, **given)  # again, without a tracker


def test_a_validation_of_an_older_checkpoint_replaces_nothing(tmp_path, whole_if_marked, monkeypatch):
    older, newer = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 10)
    write_tracker_atomically(tmp_path, 10)
    for given in (
        {"resume_mode": "resume_path", "resume_from_path": str(older)},
        {"resume_mode": "disable"},
    ):
        start_and_die(tmp_path, monkeypatch, False, val_only=True, **given)
        assert find_resume_folder(config_for(tmp_path)) == newer


@pytest.mark.parametrize(
    "trainer, error, text",
    [
        ({"resume_mode": "sometimes"}, WrongSetting, "one of auto, disable, resume_path"),
        ({"resume_mode": "resume_path"}, WrongSetting, "trainer.resume_from_path=None must name"),
        ({"resume_mode": "resume_path", "resume_from_path": "x/step_3"}, WrongSetting, "global_step_<N>"),
        ({"resume_mode": "resume_path", "resume_from_path": "global_step_x"}, WrongSetting, "must name"),
        ({"default_hdfs_dir": "hdfs://a"}, UnsupportedInput, "trainer.default_hdfs_dir=hdfs://a"),
    ],
)
def test_wrong_ways_to_resume_are_refused(tmp_path, trainer, error, text):
    with pytest.raises(error, match=text) as caught:
        find_resume_folder(config_for(tmp_path, **trainer))
    assert isinstance(caught.value, ValueError)


def test_a_damaged_checkpoint_is_named_with_the_one_before_it(tmp_path, whole_if_marked):
    earlier = make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 4, whole=False)
    write_tracker_atomically(tmp_path, 4)
    with pytest.raises(WrongInput, match="global_step_4 cannot be resumed from: actor") as caught:
        find_resume_folder(config_for(tmp_path))
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={earlier}" in str(caught.value)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("ab")
    with pytest.raises(WrongInput, match="holds 'ab' instead of a step"):
        find_resume_folder(config_for(tmp_path))


def test_the_state_of_the_driver(tmp_path):
    with pytest.raises(WrongInput, match=r"data\.pt is missing: .* Copy it back"):
        load_driver_state(tmp_path)
    torch.save({"position": 3}, tmp_path / "data.pt")  # as other tools write it: the loader alone
    assert load_driver_state(tmp_path) == ({"position": 3}, {})
    whole = (tmp_path / "data.pt").read_bytes()
    (tmp_path / "data.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WrongInput, match=r"data\.pt cannot be read"):
        load_driver_state(tmp_path)


def _places(tree, above=()):
    for key in tree if isinstance(tree, dict) else ():
        yield (*above, key)
        yield from _places(tree[key], (*above, key))


def test_a_state_with_a_wrong_value_anywhere_is_refused_by_the_name_of_its_file(tmp_path):
    """The archive is whole, so only loader and driver can notice; the loader does so when it is first read."""

    def checkpoints(trainer, groups):
        run = replace(trainer.run_config, trainer=replace(trainer.run_config.trainer, default_local_dir=str(tmp_path)))
        return Checkpoints(run, trainer.state, groups, trainer.train_dataloader, KL_CONTROLLER)

    first = trainer_at_start(3)
    drawn = draw(first)
    next(drawn)
    checkpoints(first, {"actor": WritingGroup(tmp_path)}).save()
    folder = tmp_path / "global_step_1"
    loader_state, driver = load_driver_state(folder)
    good = {"dataloader": loader_state, "driver": driver}
    rest = list(drawn)
    refused = 0
    for place in [None, *_places(good)]:
        for wrong in ["missing", "x", []] if place else [None]:
            content = copy.deepcopy(good)
            if place:
                node = reduce(lambda tree, key: tree[key], place[:-1], content)
                node[place[-1]] = wrong
                if wrong == "missing":
                    del node[place[-1]]
            torch.save(content, folder / "data.pt")
            trainer = trainer_at_start(3)
            try:
                trainer.checkpoints = checkpoints(trainer, {})
                trainer.checkpoints.load(folder)
                seen = list(draw(trainer))
            except WrongInput as error:
                assert f"{folder / 'data.pt'} cannot be restored" in str(error), (place, wrong)
                assert "trainer.resume_from_path" in str(error)
                refused += 1
            except Exception as error:
                assert f"The position in the data was read from {folder / 'data.pt'}" in error.__notes__, (place, wrong)
                refused += 1
            else:
                assert len(seen) == 2, (place, wrong)
                assert place or seen == rest, "the state as it was"
    assert refused > 25


class Curriculum:
    """The state of a sampler of the user's."""


def test_a_prepared_or_renamed_checkpoint_is_refused_before_ray_starts(tmp_path):
    """No torch is needed for this, so the launching process does it."""
    folder = tmp_path / "global_step_4"
    Manifest(1, 0, 4).write(folder / "actor")
    write_text(folder / "actor", "fsdp_config.json", '{"world_size": 1}')
    run = config_for(tmp_path, n_gpus_per_node=1)
    write_tracker_atomically(tmp_path, 4)
    with pytest.raises(WrongInput, match=r"data\.pt is missing: .* Copy it back"):
        find_resume_folder(run)
    save_driver_state(folder, {"sampler": Curriculum()}, {})
    name = f"{__name__}.Curriculum"
    refusal = rf"data\.pt names {name}.* trainer\.trusted_classes=\[{name}\]"
    with pytest.raises(WrongInput, match=refusal):
        find_resume_folder(run)
    assert find_resume_folder(config_for(tmp_path, n_gpus_per_node=1, trusted_classes=[name])) == folder
    save_driver_state(folder, {"position": 3}, {})
    assert find_resume_folder(run) == folder
    folder.rename(tmp_path / "global_step_8")
    write_tracker_atomically(tmp_path, 8)
    with pytest.raises(WrongInput, match="actor: it was saved at step 4, the folder's name says 8"):
        find_resume_folder(run)


@pytest.mark.parametrize("other, warns", [([4, 3, 2, 1], True), ([1, 2, 3, 4], False), ([1, 2, 3, 4, 5], True)])
def test_other_data_than_those_of_the_checkpoint_are_named(tmp_path, caplog, other, warns):
    def data(values):
        return SimpleNamespace(rows_digest=rows_digest([pa.table({"prompt": values})]))

    saved = digest_of(data([1, 2, 3, 4]))
    warn_of_other_data(saved, data(other))
    assert ("data.train_files: the rows, their order" in caplog.text) == warns
    warn_of_other_data(None, data(other))  # a checkpoint of an earlier version
    warn_of_other_data(saved, SimpleNamespace())  # a data set of the user's
    assert len(caplog.records) == warns


def test_the_digest_of_rows_does_not_depend_on_how_their_file_is_cut(tmp_path):
    names = ["a", None, "b"] * 4000
    table = pa.table({"prompt": [[{"role": name, "content": "x"}] for name in names], "n": names})
    found = set()
    for rows in (777, 8192, 100_000):
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=rows)
        found.add(rows_digest([pq.read_table(tmp_path / "rows.parquet")]))
    assert len(found) == 1


def test_folders_that_the_workers_have_emptied_are_removed(tmp_path):
    kept, emptied = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 1)
    (emptied / "actor" / "whole").unlink()
    for folder in (kept, emptied):
        save_driver_state(folder, {}, {})
    others = [tmp_path / name for name in ("global_step_2.tar.gz", "global_step_7", "global_step_")]
    for path in others:
        path.write_text("a file of the user's")
    remove_emptied_folders(tmp_path)
    assert kept.exists() and not emptied.exists() and all(path.exists() for path in others)


# ---- dumps


class WritingGroup:
    """Workers that write a file for a checkpoint, or die of the one of a step, and remove those before it."""

    def __init__(self, root, dies_at=None):
        self.root, self.dies_at = root, dies_at

    def save_checkpoint(self, path, remote, step, max_ckpt_to_keep=None):
        assert not max_ckpt_to_keep  # nothing may be removed yet
        if step == self.dies_at:
            raise RuntimeError("killed")
        Path(path).mkdir(parents=True)
        Path(path, "model.pt").touch()

    def keep_latest_checkpoints(self, path, max_ckpt_to_keep):
        assert max_ckpt_to_keep == 1 and f"global_step_{read_tracker(self.root, None)}/" in path
        for older in self.root.glob(f"global_step_*/{Path(path).name}"):
            if str(older) != path:
                shutil.rmtree(older)


LOADER = SimpleNamespace(state_dict=dict, dataset=None, sampler=None)
KL_CONTROLLER = SimpleNamespace(state_dict=dict, load_state_dict=dict)


def checkpoints_of(root, state, groups, in_background=False, save_freq=1):
    trainer = {"default_local_dir": str(root), "default_hdfs_dir": f"{root}/remote", "save_freq": save_freq}
    trainer |= {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1}
    node = {"trainer": trainer, "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": in_background}}}}
    return Checkpoints(RunConfig.parse(OmegaConf.create(node)), state, groups, LOADER, KL_CONTROLLER)


class Loader(list):
    """A loader of no batches."""

    dataset = sampler = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_another_batch_size_than_in_the_checkpoint_is_named(tmp_path, caplog):
    state = RunState(seed=1, total_steps=9)
    reader = SimpleNamespace(load_checkpoint=lambda path, del_local_after_load: None)
    folder = tmp_path / "global_step_2"
    for saved, warns in ((1024, False), (8, True)):
        save_driver_state(folder, {}, {"seed": 1, "epoch": 0, "train_batch_size": saved})
        checkpoints = checkpoints_of(tmp_path, state, {"actor": reader})
        checkpoints.loader = Loader()
        checkpoints.load(folder)
        assert ("data.train_batch_size=1024, and was 8 in the checkpoint" in caplog.text) == warns


def test_a_file_of_a_recipe_that_was_changed_is_named(tmp_path):
    state = RunState(seed=1, total_steps=9, step=2)
    reader = SimpleNamespace(load_checkpoint=lambda path, del_local_after_load: None)
    checkpoints = checkpoints_of(tmp_path, state, {"actor": WritingGroup(tmp_path)})
    checkpoints.loader = Loader()
    path = checkpoints.begin() / "groups.pkl"
    path.write_bytes(b"responses")
    checkpoints.save(extra_files=[path.name])
    checkpoints.groups = {"actor": reader}
    checkpoints.load(path.parent)
    (found,) = checkpoints.extra_files
    checkpoints.check_extra_file(found)
    for content in (b"responsez", b"response"):
        path.write_bytes(content)
        with pytest.raises(WrongInput, match="global_step_2 cannot be resumed from: groups.pkl has"):
            checkpoints.check_extra_file(found)
    path.unlink()
    checkpoints.check_extra_file(found)  # whoever reads it names it


def test_an_adaptive_weight_goes_on_unless_its_start_was_changed(tmp_path, caplog):
    def checkpoints(coef):
        node = {"trainer": {"default_local_dir": str(tmp_path)}, "algorithm": {"kl_ctrl": {"kl_coef": coef}}}
        state = RunState(seed=1, total_steps=9)
        state.step = 1
        controller = AdaptiveKLController(coef, target_kl=0.1, horizon=100.0)
        run = RunConfig.parse(OmegaConf.create(node))
        return Checkpoints(
            run,
            state,
            {"actor": WritingGroup(tmp_path)},
            SimpleNamespace(**vars(LOADER), load_state_dict=dict),
            controller,
        )

    saved = checkpoints(0.5)
    saved.kl_ctrl.update(0.3, 8)
    saved.save()
    for coef, expected in ((0.5, saved.kl_ctrl.value), (0.2, 0.2)):
        resumed = checkpoints(coef)
        resumed.groups = {}
        resumed.load(tmp_path / "global_step_1")
        assert resumed.kl_ctrl.value == expected
        told = "algorithm.kl_ctrl.kl_coef=0.2, and was 0.5 in the checkpoint"
        assert (told in caplog.text) == (coef == 0.2)


def test_another_order_or_the_data_of_another_step_is_refused(tmp_path, caplog):
    reader = SimpleNamespace(load_checkpoint=lambda path, del_local_after_load: None, save_checkpoint=lambda *a: None)
    kl = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)

    def checkpoints(shuffle, step, seed=5):
        checkpoints = checkpoints_of(tmp_path, RunState(seed=1, total_steps=9), {})
        checkpoints.state.step = step
        checkpoints.groups, checkpoints.kl_ctrl = {"actor": reader}, kl
        sampler = create_rl_sampler({"shuffle": shuffle, "seed": seed}, Numbers())
        data = RunConfig.parse(OmegaConf.create({"data": {"train_batch_size": BATCH}})).data
        checkpoints.loader = loaders.train_loader(data, 1, Numbers(), None, sampler)
        return checkpoints

    for step in (2, 3):
        saved = checkpoints(True, step)
        save_driver_state(saved.folder(step), saved.loader.state_dict(), {"step": step, "order": "data.shuffle=true"})
    folder = saved.folder(3)
    with pytest.raises(ValueError, match=r"data.shuffle=false, and data.shuffle=true in the checkpoint.*write"):
        checkpoints(False, 3).load(folder)
    checkpoints(True, 3).load(folder)
    shutil.copy(saved.folder(2) / "data.pt", folder)
    with pytest.raises(WrongInput, match=r"data\.pt was saved at step 2: copy the file of step 3 back"):
        checkpoints(True, 3).load(folder)


def test_another_seed_of_the_order_is_named(caplog):
    state = iter(create_rl_sampler({"shuffle": True, "seed": 5}, Numbers())).state_dict()
    for seed, told in ((5, False), (None, False), (6, True)):
        iter(create_rl_sampler({"shuffle": True, "seed": seed}, Numbers())).load_state_dict(state)
        assert ("order of the rows is 6, and was 5 in the checkpoint" in caplog.text) == told


def test_a_checkpoint_is_removed_only_when_the_next_one_is_named(tmp_path):
    """Where the critic dies in a save, the actor's part of the checkpoint before is still there."""
    state = RunState(seed=1, total_steps=9)
    groups = {"actor": WritingGroup(tmp_path), "critic": WritingGroup(tmp_path, dies_at=3)}
    for state.step in (1, 2):
        checkpoints_of(tmp_path, state, groups).save()
        assert [path.name for path in tmp_path.glob("global_step_*")] == [f"global_step_{state.step}"]
    state.step = 3
    with pytest.raises(RuntimeError, match="killed"):
        checkpoints_of(tmp_path, state, groups).save()
    assert read_tracker(tmp_path, None) == 2
    assert load_driver_state(tmp_path / "remote" / "global_step_1") == (
        {},
        {"kl_ctrl_in_reward": {}, "seed": 1, "epoch": 0, "spares_drawn": 0}
        | {"data_digest": None, "train_batch_size": 1024, "step": 1, "order": None},
    )
    assert sorted(path.name for path in (tmp_path / "global_step_2").iterdir()) == ["actor", "critic", "data.pt"]


def test_the_kl_coefficient_goes_on_where_it_was(tmp_path):
    class Group(WritingGroup):
        def load_checkpoint(self, path, del_local_after_load):
            pass

    def checkpoints(coefficient):
        made = checkpoints_of(tmp_path, RunState(seed=1, total_steps=9, step=2), {"actor": Group(tmp_path)})
        made.loader = Loader()
        made.kl_ctrl = AdaptiveKLController(coefficient, target_kl=1.0, horizon=100.0)
        return made

    checkpoints(0.3).save()
    resumed = checkpoints(0.1)
    resumed.load(resumed.folder(2))
    assert resumed.kl_ctrl.value == 0.3


def test_the_next_complete_checkpoint_removes_those_of_killed_saves_and_names_them(tmp_path, caplog):
    """Also one whose actor's part is complete; the folder of a user stays, and so does the save that is under way."""
    for step in (2, 4):
        kill_in(SAVE, tmp_path / f"global_step_{step}")
    (tmp_path / "global_step_6" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_7").touch()
    (tmp_path / "global_step_8.tar.gz").touch()
    state = RunState(seed=1, total_steps=9)
    groups = {"actor": WritingGroup(tmp_path), "critic": WritingGroup(tmp_path, dies_at=3)}
    kept = {"global_step_6", "global_step_7", "global_step_8.tar.gz", "global_step_x"}
    state.step = 3
    with pytest.raises(RuntimeError, match="killed"):  # not complete: removes nothing
        checkpoints_of(tmp_path, state, groups).save()
    assert {path.name for path in tmp_path.glob("global_step_*")} == kept | {f"global_step_{n}" for n in (2, 3, 4)}
    state.step = 5
    checkpoints_of(tmp_path, state, groups).save()
    assert {path.name for path in tmp_path.glob("global_step_*")} == kept | {"global_step_3", "global_step_5"}
    (told,) = [record.getMessage() for record in caplog.records if "that a killed run had left" in record.getMessage()]
    assert told.endswith(f": {tmp_path}/global_step_2, {tmp_path}/global_step_4")
    assert sorted(path.name for path in (tmp_path / "global_step_5").iterdir()) == ["actor", "critic", "data.pt"]


def test_what_stands_in_the_place_of_a_checkpoint_or_of_the_tracker_does_not_end_a_run(tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    (tmp_path / "global_step_1").touch()
    (tmp_path / "global_step_2").symlink_to("nowhere")
    tracker.mkdir()
    state = RunState(seed=1, total_steps=9)
    for state.step in (1, 2):
        checkpoints_of(tmp_path, state, {"actor": WritingGroup(tmp_path)}).save()
        assert read_tracker(tmp_path, None) == state.step


def test_a_checkpoint_on_another_disk_is_removed_through_its_link(tmp_path):
    state = RunState(seed=1, total_steps=9)
    groups = {"actor": WritingGroup(tmp_path)}
    for state.step in (1, 2):
        checkpoints_of(tmp_path, state, groups).save()
        if state.step == 1:
            (tmp_path / "disk").mkdir()
            moved = (tmp_path / "global_step_1").rename(tmp_path / "disk" / "global_step_1")
            (tmp_path / "global_step_1").symlink_to(moved)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]
    assert not moved.exists()


def test_a_checkpoint_in_the_background_is_named_when_all_workers_are_done(tmp_path):
    class SlowGroup(WritingGroup):
        done = False

        def finish_checkpoint(self, wait):
            return [True, self.done or wait]

    state = RunState(seed=1, total_steps=9, step=1)
    groups = {"actor": SlowGroup(tmp_path)}
    checkpoints = checkpoints_of(tmp_path, state, groups, in_background=True)
    checkpoints.save()
    checkpoints.finish(wait=False)
    assert state.unfinished_checkpoint == 1 and read_tracker(tmp_path, None) is None
    groups["actor"].done = True
    checkpoints.finish(wait=False)
    assert state.unfinished_checkpoint is None and read_tracker(tmp_path, None) == 1
    groups["actor"].done = False
    state.step = 9
    checkpoints.save()  # the last step waits
    assert read_tracker(tmp_path, None) == 9


@pytest.mark.parametrize("in_background", [False, True])
def test_the_tracker_names_a_step_only_when_the_record_has_it(tmp_path, monkeypatch, in_background):
    """A run that is killed anywhere between a save and the next step has each step once in its record, once resumed."""

    class Group(WritingGroup):
        def finish_checkpoint(self, wait):
            return [True]

        def keep_latest_checkpoints(self, path, max_ckpt_to_keep):
            pass

    class Killed(BaseException):
        pass

    def run(resumed, dies=None):
        trainer = RayPPOTrainer.__new__(RayPPOTrainer)
        state = RunState(seed=1, total_steps=4, step=resumed or 0)
        group = {"actor": Group(tmp_path)}
        trainer.checkpoints = checkpoints_of(tmp_path, state, group, in_background=in_background, save_freq=1)
        trainer.run_config, trainer.state = trainer.checkpoints.run, state
        record = RunRecord(tmp_path, resumed)

        def finish_step(*arguments):
            if dies == (state.step, "before the record"):
                raise Killed
            record.log({"x": state.step}, state.step)
            if dies == (state.step, "before the tracker"):
                raise Killed

        for name in ("_sync_before_generation", "_dump"):
            monkeypatch.setattr(trainer, name, lambda *arguments: None, raising=False)
        trainer._watched = lambda timing: nullcontext()
        trainer.train_dataloader = None
        monkeypatch.setattr(trainer, "_finish_step", finish_step)
        course = Course(
            trainer.run_config,
            state,
            trainer.checkpoints,
            dict,
            trainer._save_checkpoint,
            lambda *arguments: None,
            (),
        )
        course.ends_after_first_validation = lambda: False
        trainer._run = lambda: nullcontext(course)
        trainer._training_rows = lambda: iter(())
        trainer.collect, trainer._checked = lambda *arguments: DataProto(), lambda name, batch, *arguments: batch
        trainer.fit()

    for dies in ("before the record", "before the tracker"):
        for step in (2, 3):
            with pytest.raises(Killed):
                run(None, (step, dies))
            assert read_tracker(tmp_path, None) == step - 1
            for folder in tmp_path.glob("global_step_*"):
                if files.step_in_name(folder) >= step:
                    shutil.rmtree(folder)  # the workers of this test do not write into one that exists
            run(step - 1)
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
            assert read_tracker(tmp_path, None) == 4
            for path in tmp_path.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    state = RunState(seed=1, total_steps=7)
    checkpoints = checkpoints_of(tmp_path, state, {}, save_freq=3)
    assert [state.step for state.step in range(1, 8) if checkpoints.is_due()] == [3, 6, 7]
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(int(time.time()) + 100))
    state.step = 1
    assert not checkpoints.is_due()
    state.max_step_s = 60.0
    assert checkpoints.is_due()


def test_dumps_are_in_the_order_in_which_rows_were_asked_for(tmp_path, monkeypatch):
    import numpy as np

    from verl.protocol import DataProto

    truths = np.array([{"ground_truth": "5"}, {}], dtype=object)
    batch = DataProto.from_dict(
        {
            "prompts": torch.tensor([[1], [2]]),
            "responses": torch.tensor([[3, 4], [5, 6]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.25, 0.25]]),
        },
        {"reward_model": truths},
    )
    tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [f"t{row.tolist()}" for row in ids])
    extras = {"acc": [True, False], "short": [1]}
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.state = RunState(seed=1, step=3, row_order=[1, 0])
    trainer.tokenizer = tokenizer
    trainer._log_rollout_data(batch, extras, {}, "~/dumps")
    path = tmp_path / "dumps" / "3.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"input": "t[2]", "output": "t[5, 6]", "gts": None, "score": 0.5, "step": 3, "acc": False},
        {"input": "t[1]", "output": "t[3, 4]", "gts": "5", "score": 1.0, "step": 3, "acc": True},
    ]
