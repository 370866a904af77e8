"""What a killed save or removal leaves goes with the next save; nothing else does."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.utils.checkpoint.killed import FOLDER, REMOVAL, SAVE, TRACKER, hanging, kill_in
from verl.utils.checkpoint.files import (
    LAYOUT_NAME,
    Manifest,
    find_complete_checkpoints,
    get_checkpoint_tracker_filename,
    make_folder,
    move_files,
    temporary_folder,
    write_text,
    write_tracker_atomically,
)
from verl.utils.checkpoint.removal import MARK_NAME, SaveMark, remove_checkpoint, remove_leftovers


def complete(folder: Path) -> Path:
    """Write a checkpoint of a supervised run."""
    write_text(folder, LAYOUT_NAME, '{"world_size": 1}')
    Manifest(1, 0, 0).write(folder)
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").touch()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_of_a_save_goes_when_the_save_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_3"
    with hanging(SAVE, folder):
        assert remove_leftovers(tmp_path) == []
        assert names(folder) == [MARK_NAME, "actor"]
    assert remove_leftovers(tmp_path) == [folder]
    assert names(tmp_path) == []


def test_a_folder_without_the_mark_of_a_save_of_this_run_stays(tmp_path: Path) -> None:
    """One without a mark, one with a mark that somebody else has made, and one that was copied from another run."""
    other = tmp_path / "other" / "global_step_3"
    kill_in(SAVE, other)
    run = tmp_path / "run"
    shutil.copytree(other, run / "global_step_3")
    (run / "global_step_4" / "actor").mkdir(parents=True)
    (run / "global_step_5" / "actor").mkdir(parents=True)
    (run / "global_step_5" / MARK_NAME).touch()
    (run / "global_step_6").symlink_to(other)
    (run / "global_step_x").mkdir()
    (run / "global_step_x" / MARK_NAME).write_text(str(run / "global_step_x"))
    before = sorted(tmp_path.rglob("*"))
    assert remove_leftovers(run) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_complete_checkpoint_stays_and_loses_its_mark(tmp_path: Path) -> None:
    """A run may die between its last file and the tracker."""
    folder = complete(tmp_path / "global_step_3")
    kill_in(SAVE, folder)
    shutil.rmtree(folder / "actor")
    assert remove_leftovers(tmp_path) == []
    assert find_complete_checkpoints(tmp_path) == [str(folder)]
    assert MARK_NAME not in names(folder)


@pytest.mark.parametrize("part", ["", "actor"])
def test_a_removal_that_was_killed_is_finished(tmp_path: Path, part: str) -> None:
    """Of a whole checkpoint, or of one of its roles."""
    folder = complete(tmp_path / "global_step_3" / part)
    with hanging(REMOVAL, folder):
        assert remove_leftovers(tmp_path) == []
        assert "huggingface" in names(folder)
    assert remove_leftovers(tmp_path) == [folder]
    assert not folder.exists()


def test_a_file_goes_when_its_writer_has_died(tmp_path: Path) -> None:
    """Also in the folder of a checkpoint; those of others stay."""
    others = [".latest_checkpointed_iteration.txt.1.tmp", ".x.tmp"]
    for name in others:
        (tmp_path / name).touch()
    folder = complete(tmp_path / "global_step_3")
    whole = names(folder)
    kill_in(TRACKER, folder)
    with hanging(TRACKER, tmp_path):
        assert len(names(tmp_path)) == 4 and names(folder) != whole
        assert remove_leftovers(tmp_path) == []
        assert len(names(tmp_path)) == 4 and names(folder) == whole
    assert remove_leftovers(tmp_path) == []
    assert names(tmp_path) == [*others, "global_step_3"] and names(folder) == whole


def test_a_temporary_folder_goes_when_its_process_has_died(tmp_path: Path) -> None:
    """As that of a merged model, which may be large, when the model is merged again."""
    (tmp_path / ".merged.x.tmp").mkdir()
    with hanging(FOLDER, tmp_path):
        (left,) = tmp_path.glob(".merged.*.verl.tmp")
        with temporary_folder(tmp_path, "merged"), temporary_folder(tmp_path, "other"):
            assert len(names(tmp_path)) == 4 and left.exists()
    with temporary_folder(tmp_path, "other"):
        assert left.exists()
    with temporary_folder(tmp_path, "merged"):
        assert not left.exists()
    assert names(tmp_path) == [".merged.x.tmp"]


@pytest.mark.parametrize("blocked", ["global_step_7", "global_step_7/actor"])
@pytest.mark.parametrize("kind", ["file", "link to nowhere"])
def test_ranks_that_make_a_folder_at_once_rename_what_has_its_name_once(
    tmp_path: Path, blocked: str, kind: str
) -> None:
    """None renames the folder that another one has made."""
    for turn in range(20):
        folder = tmp_path / str(turn) / "global_step_7" / "actor"
        path = tmp_path / str(turn) / blocked
        path.parent.mkdir(parents=True)
        path.write_text("mine") if kind == "file" else path.symlink_to("nowhere")
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(make_folder, folder) for _ in range(8)]:
                done.result()
        (aside,) = path.parent.glob(f"{path.name}.aside.*")
        assert folder.is_dir()
        assert aside.read_text() == "mine" if kind == "file" else aside.is_symlink()


def test_a_folder_that_has_the_name_of_a_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "data.pt" / "mine").mkdir(parents=True)
    write_text(tmp_path, "data.pt", "new")
    assert (tmp_path / "data.pt").read_text() == "new" and (tmp_path / "data.pt.aside.1" / "mine").is_dir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("new")
    (tmp_path / "huggingface" / "config.json").mkdir(parents=True)
    move_files(tmp_path / "new", tmp_path, "huggingface")
    assert names(tmp_path / "huggingface") == ["config.json", "config.json.aside.1"]


def test_a_link_to_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    folder = complete(tmp_path / "disk" / "global_step_3")
    link = tmp_path / "global_step_3"
    link.symlink_to(folder)
    remove_checkpoint(link)
    assert not link.is_symlink() and not folder.exists()


def test_what_stands_in_the_place_of_a_checkpoint_is_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file, a link to nowhere, and a folder in the place of the tracker."""
    (tmp_path / "global_step_7").write_text("mine")
    (tmp_path / "global_step_7.aside.1").touch()
    (tmp_path / "global_step_3").symlink_to("nowhere")
    tracker = Path(get_checkpoint_tracker_filename(tmp_path))
    (tracker / "mine").mkdir(parents=True)
    for step in (3, 7):
        SaveMark(tmp_path / f"global_step_{step}").remove()
        write_tracker_atomically(tmp_path, step)
    assert (tmp_path / "global_step_7.aside.2").read_text() == "mine"
    assert (tmp_path / "global_step_3.aside.1").is_symlink()
    assert (tmp_path / f"{tracker.name}.aside.1" / "mine").is_dir()
    assert all((tmp_path / f"global_step_{step}").is_dir() for step in (3, 7)) and tracker.read_text() == "7"
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == [
        "global_step_3.aside.1",
        f"{tracker.name}.aside.1",
        "global_step_7.aside.2",
    ]
