"""The command line: what is accepted, what is refused, and how it says so."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException

from verl.base_config import ConfigError, Violation, nearest
from verl.trainer import main_ppo
from verl.trainer.config import invocation, problems
from verl.trainer.config.cli import CONFIG_DIR, unreadable
from verl.trainer.config.help_text import help_text
from verl.trainer.config.invocation import NOT_LOOKED_AT
from verl.trainer.config.overrides import fitted_overrides, prepare_arguments
from verl.trainer.config.problems import MOST_PROBLEMS, problems_shown

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def fit(*overrides, name="ppo_trainer"):
    return fitted_overrides(list(overrides), name, CONFIG_DIR)


ACCEPTED = {
    "data.seed=3": "data.seed=3",
    "+data.shuffle=false": "++data.shuffle=false",
    "data.gen_batch_size=3": "++data.gen_batch_size=3",
    "+trainer.wandb_proxy=p": "++trainer.wandb_proxy=p",
    "trainer.log_freq=1": "++trainer.log_freq=1",
    "+actor_rollout_ref.model.override_config.a.b=1": "++actor_rollout_ref.model.override_config.a.b=1",
    "reward_model.reward_kwargs={x: {y: 1}}": "reward_model.reward_kwargs={x: {y: 1}}",
    "~trainer.logger": "~trainer.logger",
    "hydra.run.dir=.": "hydra.run.dir=.",
    "data@data=legacy_data": "data=legacy_data",
    "actor@actor_rollout_ref.actor=dp_actor": "actor@actor_rollout_ref.actor=dp_actor",
}

REFUSED = {
    "actor_rollout_ref.actor.lr=1": "actor_rollout_ref.actor.optim.lr",
    "trainer.n_gpu_per_node=1": "trainer.n_gpus_per_node",
    "+data.gen_batchsize=1": "data.gen_batch_size",
    "rollout.n=4": "actor_rollout_ref.rollout.n",
    "algorithm.kl_ctrl.coef=1": "algorithm.kl_ctrl.kl_coef",
    "+data={max_prompt_lenght: 3}": "data.max_prompt_length",
    "~trainer.loger": "trainer.logger",
    "actor_rollout_ref.actor.tis_imp_ratio_cap=2": "algorithm.rollout_is_threshold",
    "global_profiler.tool_config.nsys.discrete=true": "global_profiler.global_tool_config",
    "trainer.profile_steps=[1]": "global_profiler.steps",
    "actor_rollout_ref.profiler.ranks=[0]": "write actor_rollout_ref.actor.profiler",
    "+actor_rollout_ref.actor.profile.step_start=1": "actor_rollout_ref.actor.profiler.enable",
}


def test_accepted_with_and_without_a_plus():
    assert fit(*ACCEPTED) == list(ACCEPTED.values())


def test_refused_with_what_was_meant():
    with pytest.raises(ConfigError) as info:
        fit("data.seed=3", *REFUSED)
    assert len(info.value.violations) == len(REFUSED)  # all are listed
    for override, meant in REFUSED.items():
        assert any(each.key in override.replace("={", ".") and meant in each.expected for each in info.value.violations)


def test_how_a_node_with_a_dataclass_gets_a_key():
    with pytest.raises(ConfigError) as info:
        fit("+actor_rollout_ref.actor.tau=1", "+trainer.tau=1")
    actor, trainer = [violation.expected for violation in info.value.violations]
    assert "the dataclass verl.workers.config.FSDPActorConfig" in actor
    assert "`@dataclass class Mine(FSDPActorConfig): tau: int = 0`" in actor
    assert actor.endswith("write actor_rollout_ref.actor._target_=my_module.Mine") and "dataclass" not in trainer


def test_more_problems_than_a_terminal_shows_go_to_a_file(monkeypatch):
    error = ConfigError([Violation(f"a.b{i}", i, "must be a letter") for i in range(MOST_PROBLEMS + 5)])
    lines = problems_shown(error).splitlines()
    assert lines[0] == f"error in the configuration: {MOST_PROBLEMS + 5} problems:" and len(lines) == MOST_PROBLEMS + 2
    assert lines[-1].startswith("  ... and 5 more, in ")
    file = Path(lines[-1].rpartition(" ")[2])
    assert len(file.read_text().splitlines()) == MOST_PROBLEMS + 6 and file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    with monkeypatch.context() as full:
        full.setattr(problems, "NamedTemporaryFile", lambda *_, **__: open("/dev/full", "w"))
        assert len(problems_shown(error).splitlines()) == MOST_PROBLEMS + 6  # all of them, without a file
    monkeypatch.setattr(invocation.call, "only_checks", True)
    assert len(problems_shown(error).splitlines()) == MOST_PROBLEMS + 6  # a check writes no file
    assert len(problems_shown(ValueError("a\n" * 50)).splitlines()) == 5


def test_a_wrong_type_is_told_without_ray(tmp_path):
    script = (
        "import sys\nfrom verl.trainer import main_ppo\n"
        "sys.argv[1:] = ['actor_rollout_ref.rollout.name=vllm', 'trainer.nnodes=many', 'hydra.run.dir=.']\n"
        "try:\n    main_ppo.main()\nfinally:\n    print('ray' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "False"
    assert "trainer.nnodes=many: must be an integer" in done.stderr and done.stderr.strip().endswith(NOT_LOOKED_AT)


def test_several_values_are_a_list_or_several_runs():
    values = ["trainer.logger=console,wandb", "data.train_files=a.parquet,b.parquet"]
    with pytest.raises(ConfigError) as info:
        fit(*values)
    assert [str(violation) for violation in info.value.violations] == [
        f"{value}: are several values: write a list as [a,b], or quote a text that holds a comma" for value in values
    ]
    assert prepare_arguments(["--multirun", values[0]], "ppo_trainer", CONFIG_DIR) == ["--multirun", values[0]]
    assert fit("data.train_files='a,b.parquet'") == ["data.train_files='a,b.parquet'"]


@pytest.mark.parametrize("override", ["data.train_files=[a", "actor@actor_rollout_ref.actor=nonesuch"])
def test_what_hydra_cannot_read(override):
    with pytest.raises(HydraException):
        fit(override)


def test_quotes_are_offered_where_hydra_cannot_read():
    key, folder = "trainer.default_local_dir", "/runs/mine (2)/out"
    with pytest.raises(HydraException):
        fit(f"{key}={folder}")
    assert unreadable(f"{key}={folder}").endswith(f"for instance \"{key}='{folder}'\"")
    assert fit(f"{key}='{folder}'") == [f"{key}='{folder}'"]
    assert unreadable("trainer.total_epochs").endswith("with quotes around special characters")


def test_flags_are_kept_and_paths_made_absolute(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    arguments = prepare_arguments(
        ["data.gen_batch_size=1", "--cfg", "job", "-cd", str(tmp_path)], "ppo_trainer", CONFIG_DIR
    )
    assert arguments == ["--cfg", "job", "-cd", str(tmp_path), "++data.gen_batch_size=1"]
    assert prepare_arguments(["--help"], "ppo_trainer", CONFIG_DIR) == ["--help"]
    moved = prepare_arguments(["--config-path=config", "data.seed=1"], "ppo_trainer", CONFIG_DIR)
    assert moved == ["--config-path=config", "--config-path", CONFIG_DIR, "data.seed=1"]


def test_nearest_prefers_the_last_name():
    known = ["trainer.device", "data.seed", "actor_rollout_ref.rollout.seed", "trainer.seed"]
    assert nearest("trainer.sed", known)[0] == "trainer.seed"
    assert nearest("zzz", known) == []


def test_help_names_the_command_the_missing_keys_and_every_node():
    text = help_text(main_ppo.main, "ppo_trainer", CONFIG_DIR)
    assert text.startswith("Run PPO with the composed configuration.\n\nusage: python -m verl.trainer.main_ppo [")
    assert "Keys that must be given: actor_rollout_ref.rollout.name\n" in text
    assert "\n  algorithm: gamma lam adv_estimator" in text and "\n  actor_rollout_ref.ref: strategy" in text
    assert max(map(len, text.replace(CONFIG_DIR, "verl/trainer/config").splitlines())) <= 110


def test_a_command_ends_with_a_message_and_code_2(tmp_path):
    """The whole way, with Hydra's own output folder, through one command that validates."""
    script = tmp_path / "command.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from verl.trainer.config.cli import hydra_main
        from verl.trainer.config.validation import validate_config

        @hydra_main("ppo_trainer")
        def main(config):
            assert config.data.gen_batch_size == 4
            validate_config(config, False, True)

        main()
        """)
    )

    def run(*arguments):
        command = [sys.executable, str(script), *arguments]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    refused = run("data.gen_batch_size=4", "data.truncation=cut", "hydra.run.dir=.")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "actor_rollout_ref.rollout.name=???: is missing: write vllm, sglang or hf" in refused.stderr
    assert "data.truncation=cut: must be one of error, left, right, middle" in refused.stderr
    unknown = run("trainer.n_gpus=4", "data.max_prompt_length=long")
    assert unknown.returncode == 2 and "trainer.n_gpus_per_node" in unknown.stderr
    assert "data.max_prompt_length=long: must be an integer" in unknown.stderr  # the type of another key
    assert unknown.stderr.splitlines()[-1] == NOT_LOOKED_AT
    shown = run("data.gen_batch_size=4", "--cfg", "job", "data.seed=7")
    assert shown.returncode == 0 and "gen_batch_size: 4" in shown.stdout and "seed: 7" in shown.stdout
    assert shown.stderr == "--cfg shows a configuration and does not check it: --check does\n"
    flag = run("data.seed=7", "--chek", "data.gen_batch_size=4")
    assert flag.returncode == 2 and flag.stderr.startswith(
        "error in the configuration: --chek: there is no such flag; "
    )


APP = "from verl.trainer.config.cli import hydra_main\n\nhydra_main('ppo_trainer')(lambda config: None)()\n"


def test_secrets_are_masked_in_what_hydra_saves(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    secret = "hush, 'hush' \"now\""
    quoted = secret.replace("'", "\\'")
    words = [f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN='{quoted}'", "trainer.project_name=plain"]
    subprocess.run([sys.executable, "app.py", *words], cwd=tmp_path, check=True, env=ENVIRONMENT)
    saved = {path.name: path for path in tmp_path.glob("outputs/*/*/.hydra/*.yaml")}
    assert set(saved) == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    for path in saved.values():
        text = path.read_text()
        assert "hush" not in text and "***" in text and "plain" in text
        assert path.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(saved["config.yaml"].read_text())["data"]["prompt_key"] == "prompt"


def test_a_deleted_working_folder_is_named(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "gone").mkdir()
    command = f"rmdir {tmp_path}/gone && exec {sys.executable} {tmp_path}/app.py"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "gone", capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error in the configuration: the working folder has been deleted: change to one that exists\n"
