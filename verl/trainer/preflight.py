"""Check a run before Ray starts: configuration, trackers, machine, data files, models and checkpoint.

Nothing here imports torch, so that a wrong key is answered in about a second.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import ConfigError, Violation, as_yaml, config_error
from verl.errors import WrongInput
from verl.trainer.config.invocation import noted, only_checks
from verl.trainer.config.keys import is_under
from verl.trainer.config.rules.megatron import megatron_engines, tell_slow_layers
from verl.trainer.config.run_config import RunConfig, TrainerConfig
from verl.trainer.config.unread_keys import tell_unread_keys
from verl.trainer.config.validation import examined_config
from verl.trainer.config.written import is_written
from verl.trainer.run.cluster import choose_cluster
from verl.trainer.run.environment import check_environment
from verl.trainer.run.inputs import (
    JSON_LINES,
    PROCESSOR_FILES,
    chat_templates_of,
    check_head,
    check_hub,
    check_machine,
    check_model,
    check_remote,
    check_written_columns,
    column_checks,
    count_rows,
    has_chat_template,
    has_field,
    local_files,
)
from verl.trainer.run.refusal import Findings
from verl.trainer.run.resume import find_resume_folder, run_folder, tell_replaced
from verl.trainer.run.user_code import check_user_code, code_of
from verl.utils import envs
from verl.utils.dataset.config import DataConfig
from verl.utils.hub import cached_folder
from verl.utils.observe.tracking import check_backends, wandb_obstacle
from verl.utils.process.lifetime import passes_in_fork
from verl.utils.value_heads import HEAD_NAME
from verl.workers.config import RewardModelConfig
from verl.workers.rewards.signature import ONE_BY_ONE

if TYPE_CHECKING:
    from verl.utils.dataset.files import ColumnCheck

logger = logging.getLogger(__name__)


def check_inputs(
    config: DictConfig,
    recipe_nodes: Collection[str] = (),
    of_fork: bool = False,
    recipe_rules: Callable[[RunConfig], Iterable[Violation]] | None = None,
) -> RunConfig:
    """Check everything that can be checked before Ray starts, and return the parsed configuration.

    ``recipe_nodes`` are nodes that the recipe reads, and that the main trainer refuses; ``recipe_rules`` yields what
    the recipe refuses. Settings that only the code of a user's fork of verl can judge are left to that code.

    Raises: WrongInput with everything that is wrong: the dotted key or the file, the value, and what would be right.
    """
    leave_out_wandb(config)
    findings = Findings()
    try:
        run, violations = examined_config(
            config,
            recipe_nodes=recipe_nodes,
            of_fork=of_fork,
            recipe_rules=recipe_rules,
            stops_at_types=not only_checks(),
        )
    except ConfigError as error:
        noted(error)
        raise
    if violations:
        findings.errors.append(config_error(violations))
    elif not recipe_nodes and recipe_rules is None:  # the trees of recipes come from their commands
        tell_unread_keys(config, "ppo_trainer")
    broken = {violation.key for violation in violations}
    if "trainer.logger" not in broken:
        findings.passes(check_backends, run.trainer.logger)
    if not broken & {"trainer.device", *_SIZES}:
        findings.passes(
            choose_cluster, run.ray_kwargs, {f"{node}.nnodes": nodes for node, (_, nodes) in pools_of(run).items()}
        )
        findings.passes(check_run_machine, run)
    check_environment(run.ray_kwargs, run.trainer.logger, findings)
    paths = {key: path for key, path in _paths(run).items() if key not in broken}
    if run.ray_kwargs.is_local:
        findings.passes(check_remote, paths)
    if not passes_in_fork(partial(check_files, run, broken)):  # only this check needs pyarrow and pandas
        findings.passes(check_files, run, broken)
    check_models(run, findings, broken)
    if not any(is_under(key, _OF_RESUME) for key in broken):
        findings.passes(check_resume, run)
    findings.passes(lambda: check_user_code(code_of(run, broken, of_fork), run.ray_kwargs))
    findings.refuse()
    tell_slow_layers(run.trainer.device, megatron_engines(run))
    return run


_SIZES = ("trainer.n_gpus_per_node", "trainer.nnodes")
_OF_RESUME = (*(f"trainer.{name}" for name in ("resume_mode", "resume_from_path", "default_local_dir")), *_SIZES)
_OF_RESUME += ("actor_rollout_ref.model", "critic.model")  # a checkpoint must fit them


def check_resume(run: RunConfig) -> None:
    """Check the checkpoint that the run resumes from, and name the checkpoints that the run will replace.

    Raises: as ``find_resume_folder``.
    """
    folder = find_resume_folder(run)
    if not run.trainer.val_only:
        tell_replaced(run_folder(run), folder)


def check_models(run: RunConfig, findings: Findings, broken: set[str]) -> None:
    """Check the files of the models whose keys are not ``broken``, and the chat template."""
    key = "actor_rollout_ref.model.path"
    findings.passes(check_hub_models, run, broken)
    if key not in broken:
        findings.passes(check_model, key, run.actor_rollout_ref.model.path)
    if run.critic is not None and "critic.model.path" not in broken:
        findings.passes(check_critic_model, run.critic.model.path)
    if not broken & {key, "actor_rollout_ref.model.tokenizer_path"}:
        findings.passes(check_chat_template, run)
    if run.reward_model.enable and not any(is_under(each, ["reward_model"]) for each in broken):
        findings.passes(check_reward_model, run.reward_model)


def check_critic_model(path: str) -> None:
    """Check the files of the critic's model, and its head if there is one.

    Raises: WrongInput naming the key.
    """
    shapes = check_model("critic.model.path", path)
    if shapes:  # known for safetensors on this machine
        check_head("critic.model.path", path, shapes)


def leave_out_wandb(config: DictConfig) -> None:
    """Remove wandb from the default trackers, with a notice, if it cannot log on this machine."""
    key = "trainer.logger"
    with suppress(OmegaConfBaseException):  # the checks of values name what cannot be read
        trackers = OmegaConf.select(config, key)
        if trackers != TrainerConfig().logger or is_written(key):
            return
        env_vars = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
        obstacle = wandb_obstacle({**envs.mapping(), **env_vars})
        if obstacle is not None:
            rest = [name for name in trackers if name != "wandb"]
            OmegaConf.update(config, key, rest)
            logger.warning("%s=%s: wandb is left out, since %s. Set the key to choose", key, as_yaml(rest), obstacle)


def check_run_machine(run: RunConfig) -> None:
    """Check that this machine meets the needs of the workers.

    Raises: WrongInput naming the key.
    """
    reward = run.reward_model
    shared = run.actor_rollout_ref
    engines = {"actor_rollout_ref.rollout.name": (shared.rollout.name, shared.engine_mode)}
    if reward.enable and reward.is_generative:
        engines["reward_model.name"] = (reward.name, "sync")
    check_machine(run.trainer.device, pools_of(run), run.ray_kwargs, engines)


def pools_of(run: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the nodes of the configuration that place workers, with their (n_gpus_per_node, nnodes)."""
    trainer = run.trainer
    reward = run.reward_model
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    if reward.enable and reward.enable_resource_pool:
        pools["reward_model"] = (reward.n_gpus_per_node, reward.nnodes)
    shared = run.actor_rollout_ref
    if not shared.hybrid_engine:
        pools["actor_rollout_ref.rollout"] = (shared.rollout.n_gpus_per_node, shared.rollout.nnodes)
    return pools


def _paths(run: RunConfig) -> dict[str, list[str]]:
    """Return the models and data files that every run reads, by their keys."""
    paths = {"actor_rollout_ref.model.path": [run.actor_rollout_ref.model.path]}
    if run.critic is not None:
        paths["critic.model.path"] = [run.critic.model.path]
    if not run.data.custom_cls.path:
        paths |= {"data.train_files": run.data.train_paths, "data.val_files": run.data.val_paths}
    return paths


# ---- data


def check_files(run: RunConfig, broken: Collection[str] = ()) -> None:
    """Check the data files whose keys are not ``broken``; a custom class reads its files.

    Raises: WrongInput or DataError naming the file; SeveralProblems.
    """
    if run.data.custom_cls.path:
        return
    findings = Findings()
    paths = {"data.train_files": run.data.train_paths, "data.val_files": run.data.val_paths}
    readable = {key: check_data(run.data, key, paths[key], findings) for key in paths if key not in broken}
    if readable == {key: local_files(each) for key, each in paths.items()}:
        findings.passes(check_written_names, run.data)
    check_rows(run, [*readable.values()], findings)
    findings.refuse()


def check_data(data: DataConfig, key: str, paths: list[str], findings: Findings) -> list[str]:
    """Check that the files of a key are parquet files with enough rows and a prompt column; return the valid ones."""
    rows: dict[str, int] = {}

    def count(path: str) -> None:
        rows[path] = count_rows(key, path, data.prompt_key)

    local = local_files(paths)
    readable = [path for path in local if findings.passes(count, path)]
    size = data.loader_batch_size
    if key == "data.train_files" and len(readable) == len(paths) and sum(map(rows.__getitem__, readable)) < size:
        found = sum(map(rows.__getitem__, readable))
        few = f"{key}: {found} rows in all, fewer than data.train_batch_size={size}: add rows or lower it"
        findings.errors.append(WrongInput(few))
    return readable


def check_written_names(data: DataConfig) -> None:
    """Check that a training or validation file has the columns and fields that the user asks for by name.

    Raises: WrongInput naming the key.
    """
    usual = DataConfig()
    paths = data.train_paths + data.val_paths
    names = {f"data.{key}": (data[key], usual[key]) for key in ("image_key", "video_key")}
    check_written_columns(names, paths)
    if not data.need_tools_kwargs or len(local_files(paths)) < len(paths):
        return
    if not any(has_field(path, "extra_info", "tools_kwargs") for path in local_files(paths)):
        raise WrongInput(
            "data.need_tools_kwargs=true: no data file has extra_info.tools_kwargs, the arguments of the tools of a "
            "row: add it, or write false"
        )


def check_rows(run: RunConfig, groups: Sequence[list[str]], findings: Findings) -> None:
    """Check the first rows of groups of files, by the columns that prompts and rewards are made of."""
    from verl.utils.dataset.files import check_schemas

    data = run.data
    columns = [data.prompt_key, data.reward_fn_key, "reward_model", "extra_info", *data.media_columns().values()]
    checks = _row_checks(run)

    def check_file(path: str) -> None:
        left = checks
        for check in column_checks(path, columns):
            left = [each for each in left if findings.passes(each, check)]

    for paths in groups:
        findings.passes(check_schemas, [path for path in paths if not path.endswith(JSON_LINES)])
        for path in paths:
            findings.passes(check_file, path)


def _row_checks(run: RunConfig) -> "list[Callable[[ColumnCheck], None]]":
    """Return the checks of rows that a run needs."""
    from verl.utils.dataset import files
    from verl.utils.reward_score import data_source_problem

    data = run.data
    reward = run.reward_model
    folder = Path(os.path.expanduser(run.actor_rollout_ref.model.path))
    text_only = folder.is_dir() and not any((folder / name).exists() for name in PROCESSOR_FILES)

    def check_prompts(check: "ColumnCheck") -> None:
        files.check_prompts(check, data.prompt_key, text_only, data.apply_chat_template_kwargs)
        if text_only:
            files.check_vision_rows(check, data, (), data.prompt_key)

    checks = [check_prompts, lambda check: files.check_reward_columns(check, data.reward_fn_key)]
    if _framework_scores(run):
        isolates = not reward.sandbox_fusion.url and not reward.local_sandbox.allow_unisolated
        problem_of = partial(data_source_problem, runs_code_here=run.ray_kwargs.is_local and isolates)
        checks.append(lambda check: files.check_data_sources(check, data.reward_fn_key, problem_of))
    return checks


def _framework_scores(run: RunConfig) -> bool:
    """Whether only built-in scorers can be called."""
    reward = run.reward_model
    if run.custom_reward_function.path or reward.enable or envs.read("VERL_USE_EXTERNAL_MODULES"):
        return False
    return reward.reward_manager in ONE_BY_ONE and not run.actor_rollout_ref.model.external_lib


# ---- models


def check_hub_models(run: RunConfig, broken: Collection[str] = ()) -> None:
    """Check that the models of the hub whose keys are not ``broken`` can be loaded, unless the cluster is another's.

    Raises: WrongInput naming the key.
    """
    if not run.ray_kwargs.is_local:
        return
    shared = run.actor_rollout_ref
    paths = {
        "actor_rollout_ref.model.path": shared.model.path,
        "actor_rollout_ref.model.tokenizer_path": shared.model.tokenizer_path,
        "actor_rollout_ref.ref.model.path": shared.ref.model_path,
    }
    if run.critic is not None:
        paths["critic.model.path"] = run.critic.model.path
    if run.reward_model.enable:
        paths |= {f"reward_model.model.{name}": path for name, path in run.reward_model.model.paths.items()}
    # Paths already reported; tokenizer and model may have the same path.
    told = {path for key, path in paths.items() if key in broken}
    check_hub({key: path for key, path in paths.items() if path not in told})


def check_reward_model(reward: RewardModelConfig) -> None:
    """Check the files of a reward model, the head of a classifier, and the chat template if it needs one.

    Raises: WrongInput naming the key.
    """
    key = "reward_model.model.path"
    path = reward.model.path
    reads_text = reward.model.input_tokenizer is not None
    shapes = check_model(key, path)
    for name, other in reward.model.paths.items():
        if other != path:
            check_model(f"reward_model.model.{name}", other)
    if reward.is_classifier and shapes:
        head = check_head(key, path, shapes)
        if head is None:
            raise WrongInput(
                f"{key}={path}: holds no {HEAD_NAME}.weight, the head of a model for token or sequence classification: "
                "write a reward model with one label. Other models: load them in custom_reward_function.path, or serve "
                "them and ask them there"
            )
        labels = shapes[f"{head}.weight"][0]
        if labels != 1:
            raise WrongInput(
                f"{key}={path}: its {head}.weight has {labels} labels: write a reward model with one label"
            )
    if reads_text and not _may_have_template(path):
        raise WrongInput(
            f"{key}={path}: its tokenizer has no chat template: save one with it, or write "
            "reward_model.model.input_tokenizer=null if policy and reward model share tokenizer and template"
        )
    if reads_text or reward.is_generative:
        _check_templates(key, _templates_of(path))


def check_chat_template(run: RunConfig) -> None:
    """Check that the tokenizer of a local folder can render prompts in time; a custom data set may need no template.

    Raises: WrongInput naming the key.
    """
    model = run.actor_rollout_ref.model
    in_data = run.data.apply_chat_template_kwargs.get("chat_template")
    is_given = model.custom_chat_template or in_data
    key = "path" if model.tokenizer_path in (None, model.path) else "tokenizer_path"
    path = getattr(model, key)
    if not is_given and not run.data.custom_cls.path and not _may_have_template(path):
        raise WrongInput(
            f"actor_rollout_ref.model.{key}={path}: its tokenizer has no chat template: set "
            "actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs.chat_template"
        )
    from verl.utils.chat_template import tell_unread_options

    options = run.data.apply_chat_template_kwargs
    own = {} if model.custom_chat_template else _templates_of(path)
    by_name = {name: text for templates in own.values() for name, text in templates.items()}
    tell_unread_options(options, model.custom_chat_template or by_name)
    text = in_data if isinstance(in_data, str) and in_data not in by_name else None
    if text is not None:
        check_template_ends("data.apply_chat_template_kwargs.chat_template", text)
    if model.custom_chat_template:
        check_template_ends("actor_rollout_ref.model.custom_chat_template", model.custom_chat_template)
    elif text is None:
        _check_templates(f"actor_rollout_ref.model.{key}", own, in_data)


def _templates_of(path: str) -> dict[Path, dict[str, str]]:
    """Return the chat templates of a model on this machine, also of one in the cache of the hub."""
    folder = cached_folder(path)
    return {} if folder is None else chat_templates_of(Path(folder))


def _check_templates(key: str, templates: Mapping[Path, Mapping[str, str]], name: str | None = None) -> None:
    """Try the chat templates of a model: the one of a name, or those that transformers chooses.

    Raises: WrongInput naming the file.
    """
    from verl.utils.chat_template import USED_NAMES

    for file, texts in templates.items():
        for each in [name] if name else USED_NAMES:
            if each in texts:
                check_template_ends(f"{key}={file}", texts[each], each)


def check_template_ends(place: str, template: str, name: str = "default") -> None:
    """Check that a template is valid and renders short chats within its limits.

    Args: ``place`` is the key or file that holds it; ``name`` is its name there.
    Raises: WrongInput.
    """
    from verl.utils.chat_template import shown_name, template_problem

    problem = template_problem(template)
    if problem is not None:
        raise WrongInput(f"{place}: the chat template {shown_name(name)}{problem}: correct it, or give another")


def _may_have_template(path: str) -> bool:
    folder = Path(os.path.expanduser(path))
    return not folder.is_dir() or has_chat_template(folder)
