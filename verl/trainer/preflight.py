"""Check a run before Ray starts: configuration, trackers, machine, data files, models and checkpoint.

Nothing here imports torch, so that a wrong key is answered in about a second.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import Violation, as_yaml
from verl.trainer.config.run_config import RunConfig, TrainerConfig
from verl.trainer.config.validation import checked_config
from verl.trainer.config.written import is_written
from verl.trainer.run.environment import check_environment
from verl.trainer.run.inputs import (
    JSON_LINES,
    PROCESSOR_FILES,
    InputError,
    chat_template_of,
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
from verl.trainer.run.resume import find_resume_folder, run_folder, tell_replaced
from verl.utils import envs
from verl.utils.dataset.config import DataConfig
from verl.utils.observe.tracking import check_backends, wandb_obstacle
from verl.utils.processes import passes_in_fork
from verl.utils.value_heads import HEAD_NAME
from verl.workers.config import RewardModelConfig
from verl.workers.rewards.signature import ONE_BY_ONE

logger = logging.getLogger(__name__)


def check_inputs(
    config: DictConfig,
    recipe_nodes: Collection[str] = (),
    of_fork: bool = False,
    recipe_rules: Callable[[RunConfig], Iterable[Violation]] | None = None,
) -> RunConfig:
    """Check everything that can be checked before Ray starts, and return the parsed configuration.

    ``recipe_nodes`` are nodes that the recipe reads, and that the main trainer refuses; ``recipe_rules`` yields what
    the recipe refuses. What only the code of a fork can know is left to it.

    Raises: ValueError naming the dotted key or the file, the value, and what would be right.
    """
    leave_out_wandb(config)
    run = checked_config(config, recipe_nodes=recipe_nodes, of_fork=of_fork, recipe_rules=recipe_rules)
    check_backends(run.trainer.logger)
    check_environment(run.ray_kwargs, run.trainer.logger)
    check_run_machine(run)
    if run.ray_kwargs.is_local:
        check_remote(_paths(run))
    if not passes_in_fork(partial(check_files, run)):  # which needs pyarrow and pandas, and nothing after it does
        check_files(run)
    check_hub_models(run)
    check_model("actor_rollout_ref.model.path", run.actor_rollout_ref.model.path)
    if run.critic is not None:
        shapes = check_model("critic.model.path", run.critic.model.path)
        if shapes:  # those of a model on this machine, in safetensors
            check_head("critic.model.path", run.critic.model.path, shapes)
    check_chat_template(run)
    if run.reward_model.enable:
        check_reward_model(run.reward_model)
    tell_replaced(run_folder(run), find_resume_folder(run))
    return run


def leave_out_wandb(config: DictConfig) -> None:
    """Take wandb out of the trackers if it cannot log here and the user has not chosen them, with a notice."""
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

    Raises: InputError naming the key.
    """
    trainer = run.trainer
    reward = run.reward_model
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    if reward.enable and reward.enable_resource_pool:
        pools["reward_model"] = (reward.n_gpus_per_node, reward.nnodes)
    shared = run.actor_rollout_ref
    if not shared.hybrid_engine:
        pools["actor_rollout_ref.rollout"] = (shared.rollout.n_gpus_per_node, shared.rollout.nnodes)
    engines = {"actor_rollout_ref.rollout.name": run.actor_rollout_ref.rollout.name}
    if reward.enable and reward.is_generative:
        engines["reward_model.name"] = reward.name
    check_machine(trainer.device, pools, run.ray_kwargs, engines)


def _paths(run: RunConfig) -> dict[str, list[str]]:
    """Return the models and data files that every run reads, by their keys."""
    paths = {"actor_rollout_ref.model.path": [run.actor_rollout_ref.model.path]}
    if run.critic is not None:
        paths["critic.model.path"] = [run.critic.model.path]
    if not run.data.custom_cls.path:
        paths |= {"data.train_files": run.data.train_paths, "data.val_files": run.data.val_paths}
    return paths


# ---- data


def check_files(run: RunConfig) -> None:
    """Check the data files.

    Raises: InputError or DataError naming the file.
    """
    check_data(run)
    check_written_names(run.data)
    check_rows(run)


def check_data(run: RunConfig) -> None:
    """Check that the data files are parquet files with rows and a prompt column; a custom class reads its files.

    Raises: InputError naming key, file and column.
    """
    data = run.data
    if data.custom_cls.path:
        return
    for key, paths in (("train_files", data.train_paths), ("val_files", data.val_paths)):
        local = local_files(paths)
        rows = sum(count_rows(f"data.{key}", path, data.prompt_key) for path in local)
        size = data.loader_batch_size
        if key == "train_files" and len(local) == len(paths) and rows < size:
            raise InputError(
                f"data.train_files: {rows} rows in all, fewer than data.train_batch_size={size}: add rows or lower it"
            )


def check_written_names(data: DataConfig) -> None:
    """Check that a training or validation file has the columns and fields that the user asks for by name.

    Raises: InputError naming the key.
    """
    if data.custom_cls.path:
        return
    usual = DataConfig()
    paths = data.train_paths + data.val_paths
    names = {f"data.{key}": (data[key], usual[key]) for key in ("image_key", "video_key")}
    check_written_columns(names, paths)
    if not data.need_tools_kwargs or len(local_files(paths)) < len(paths):
        return
    if not any(has_field(path, "extra_info", "tools_kwargs") for path in local_files(paths)):
        raise InputError(
            "data.need_tools_kwargs=true: no data file has extra_info.tools_kwargs, the arguments of the tools of a "
            "row: add it, or write false"
        )


def check_rows(run: RunConfig) -> None:
    """Check the first rows of the data files, by the columns that prompts and rewards are made of.

    Raises: DataError naming file, row and column.
    """
    from verl.utils.dataset.files import check_data_sources, check_prompt_rows, check_schemas, check_vision_rows
    from verl.utils.reward_score import data_source_problem

    data = run.data
    if data.custom_cls.path:
        return
    reward = run.reward_model
    isolates = not reward.sandbox_fusion.url and not reward.local_sandbox.allow_unisolated
    problem_of = partial(data_source_problem, runs_code_here=run.ray_kwargs.is_local and isolates)
    framework_scores = _framework_scores(run)
    folder = Path(os.path.expanduser(run.actor_rollout_ref.model.path))
    text_only = folder.is_dir() and not any((folder / name).exists() for name in PROCESSOR_FILES)
    for paths in (data.train_paths, data.val_paths):
        check_schemas([path for path in local_files(paths) if not path.endswith(JSON_LINES)])
    for path in local_files(data.train_paths + data.val_paths):
        media = data.media_columns().values()
        for check in column_checks(path, [data.prompt_key, data.reward_fn_key, "reward_model", "extra_info", *media]):
            check_prompt_rows(check, data.prompt_key, data.reward_fn_key, text_only, data.apply_chat_template_kwargs)
            if text_only:
                check_vision_rows(check, data, (), data.prompt_key)
            if framework_scores:
                check_data_sources(check, data.reward_fn_key, problem_of)


def _framework_scores(run: RunConfig) -> bool:
    """Whether only the scorers that come with the framework can be asked."""
    reward = run.reward_model
    if run.custom_reward_function.path or reward.enable or envs.read("VERL_USE_EXTERNAL_MODULES"):
        return False
    return reward.reward_manager in ONE_BY_ONE and not run.actor_rollout_ref.model.external_lib


# ---- models


def check_hub_models(run: RunConfig) -> None:
    """Check that models of the hub can be loaded; on another cluster the workers know better.

    Raises: InputError naming the key.
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
    check_hub(paths)


def check_reward_model(reward: RewardModelConfig) -> None:
    """Check the files of a reward model, the head of a classifier, and the chat template if it needs one.

    Raises: InputError naming the key.
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
            raise InputError(
                f"{key}={path}: holds no {HEAD_NAME}.weight, the head of a model for token or sequence classification: "
                "write a reward model with one label. Other models: load them in custom_reward_function.path, or serve "
                "them and ask them there"
            )
        labels = shapes[f"{head}.weight"][0]
        if labels != 1:
            raise InputError(
                f"{key}={path}: its {head}.weight has {labels} labels: write a reward model with one label"
            )
    if reads_text and not _may_have_template(path):
        raise InputError(
            f"{key}={path}: its tokenizer has no chat template: save one with it, or write "
            "reward_model.model.input_tokenizer=null if policy and reward model share tokenizer and template"
        )


def check_chat_template(run: RunConfig) -> None:
    """Check that the tokenizer of a local folder can render prompts in time; a custom data set may need no template.

    Raises: InputError naming the key.
    """
    model = run.actor_rollout_ref.model
    in_data = run.data.apply_chat_template_kwargs.get("chat_template")
    is_given = model.custom_chat_template or in_data
    key = "path" if model.tokenizer_path in (None, model.path) else "tokenizer_path"
    path = getattr(model, key)
    if not is_given and not run.data.custom_cls.path and not _may_have_template(path):
        raise InputError(
            f"actor_rollout_ref.model.{key}={path}: its tokenizer has no chat template: set "
            "actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs.chat_template"
        )
    found = None if is_given else chat_template_of(Path(os.path.expanduser(path)))
    if isinstance(in_data, str):
        check_template_ends("data.apply_chat_template_kwargs.chat_template", in_data)
    if model.custom_chat_template:
        check_template_ends("actor_rollout_ref.model.custom_chat_template", model.custom_chat_template)
    elif found is not None:
        check_template_ends(f"actor_rollout_ref.model.{key}={found[0]}", found[1])


def check_template_ends(name: str, template: str) -> None:
    """Check that a template is valid, and that rendering a chat of one message ends; ``name`` is that of the template.

    Raises: InputError.
    """
    from verl.utils.chat_template import template_problem

    problem = template_problem(template)
    if problem is not None:
        raise InputError(f"{name}: the chat template {problem}: correct it, or give another")


def _may_have_template(path: str) -> bool:
    folder = Path(os.path.expanduser(path))
    return not folder.is_dir() or has_chat_template(folder)
