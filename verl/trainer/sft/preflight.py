"""Check a supervised run before torch is imported: configuration, trackers, data files, model and checkpoint."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from verl.base_config import ConfigError
from verl.errors import WrongInput
from verl.models.transformers.packing import packs_rows
from verl.trainer.config.invocation import noted, only_checks
from verl.trainer.config.rules.megatron import tell_slow_layers
from verl.trainer.config.run_config import RayConfig
from verl.trainer.config.sft import SFTConfig, as_engine_tree, examined_sft_config
from verl.trainer.config.unread_keys import tell_unread_keys
from verl.trainer.run.environment import check_processes, check_rendezvous
from verl.trainer.run.inputs import check_model, check_remote, check_written_columns, column_checks, local_files
from verl.trainer.run.refusal import Findings
from verl.trainer.run.resume import ANOTHER, damaged_checkpoint, misfit, refuse_unnamed, tell_replaced
from verl.trainer.run.user_code import UserCode, check_user_code
from verl.utils import envs
from verl.utils.checkpoint.files import find_latest_ckpt_path, verify_checkpoint
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.files import as_file_list, check_conversations, check_text_pairs
from verl.utils.observe.tracking import check_backends
from verl.workers.config import McoreEngineConfig

logger = logging.getLogger(__name__)


def check_sft_inputs(config: DictConfig) -> None:
    """Check the inputs of supervised training before the model is loaded.

    Raises: WrongInput with everything that is wrong: the dotted key, or file, row and column.
    """
    findings = Findings()
    processes, of_node, rank = _process_counts()
    check_processes(processes, of_node, rank)
    try:
        run, violations = examined_sft_config(config, processes, stops_at_types=not only_checks())
    except ConfigError as error:
        noted(error)
        raise
    if violations:
        findings.errors.append(ConfigError(violations))
    broken = {violation.key for violation in violations}
    if rank == 0:
        tell_unread_keys(config, "sft_trainer")
    if rank == 0 and (idle := idle_sharing(run, "model." if "engine" in config else "")):
        logger.warning("without effect in this run: %s", idle)
    if rank == 0 and isinstance(run.engine, McoreEngineConfig):
        tell_slow_layers(run.trainer.device, [run.engine])
    findings.passes(check_rendezvous, processes)
    if "trainer.logger" not in broken:
        findings.passes(check_backends, run.trainer.logger)
    model_key = "model.path" if "engine" in config else "model.partial_pretrain"
    if model_key not in broken:
        findings.passes(check_remote, {model_key: [run.model.path]})
        findings.passes(check_model, model_key, run.model.path)
    if not broken & {"data.train_files", "data.val_files"}:
        findings.passes(check_sft_data, as_engine_tree(config).data)
    names = (model_key, "trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
    if processes == of_node and not broken & {*names}:  # other nodes may have other disks
        findings.passes(check_resume, run, processes, rank == 0)
    if rank == 0 and run.model.external_lib and "model.external_lib" not in broken:
        libs = run.model.external_lib
        code = UserCode({"model.external_lib": [libs] if isinstance(libs, str) else [*libs]})
        findings.passes(check_user_code, code, RayConfig())
    findings.refuse()


def _process_counts() -> tuple[int, int, int]:
    """Return the number of processes, that of this node, and the rank of this one, as torchrun has set them.

    Raises: WrongInput naming the variable.
    """
    try:
        return envs.integer("WORLD_SIZE", 1), envs.integer("LOCAL_WORLD_SIZE", 1), envs.integer("RANK", 0)
    except ValueError as error:
        raise WrongInput(str(error)) from None


def check_resume(run: SFTConfig, processes: int, tells: bool) -> None:
    """Check that the checkpoint that the run resumes from is whole, and that it fits the run.

    Raises: as ``check_checkpoint``.
    """
    trainer = run.trainer
    folder = check_checkpoint(trainer.resume_mode, trainer.resume_from_path, trainer.default_local_dir, tells)
    if folder is None:
        return
    problem = misfit(folder, run.engine.strategy, processes, run.model, run.checkpoint)
    if problem:
        raise damaged_checkpoint(folder, [problem], ANOTHER)


def check_sft_data(data: DictConfig) -> None:
    """Check the data files, unless a class of the user reads them.

    Raises: WrongInput naming the key, DataError naming file, row and column.
    """
    if data.custom_cls.path:
        return
    files = {key: data[key] for key in ("train_files", "val_files") if data[key]}
    check_remote({f"data.{key}": as_file_list(paths) for key, paths in files.items()})
    check_rows(data)


def idle_sharing(run: SFTConfig, node: str) -> str | None:
    """Return the key of shared prefixes, with the key that disables it; None if it has an effect or is off."""
    if packs_rows(run.engine.strategy, run.model.use_remove_padding) or not run.model.use_prefix_sharing:
        return None
    return f"{node}use_prefix_sharing=true ({node}use_remove_padding=false)"


def holds_text_pairs(data: DictConfig) -> bool:
    """Whether rows are a prompt and a response, as in the tree ``sft_trainer``, and not a conversation."""
    return "prompt_key" in data and not (data.get("multiturn") or {}).get("enable", False)


def check_rows(data: DictConfig) -> None:
    """Check the first rows of the data files, by the columns that become tokens.

    Raises: DataError naming file, row and column; SeveralProblems.
    """
    columns = DataConfig.of_data_set(data.get("multiturn") or data)
    pairs = DataConfig.of_data_set(data)
    files = as_file_list(data.train_files) + (as_file_list(data.val_files) if data.val_files else [])
    usual = DataConfig()
    names = {f"data.{key}": (pairs[key], usual[key]) for key in ("image_key", "video_key")}
    if not holds_text_pairs(data):
        node = "data.multiturn" if data.get("multiturn") else "data"
        names |= {f"{node}.{key}": (columns[key], usual[key]) for key in ("tools_key", "enable_thinking_key")}
    findings = Findings()
    findings.passes(check_written_columns, names, files)
    for path in local_files(files):
        findings.passes(_check_file, path, data, columns, pairs)
    findings.refuse()


def _check_file(path: str, data: DictConfig, columns: DataConfig, pairs: DataConfig) -> None:
    if holds_text_pairs(data):
        for check in column_checks(path, [pairs.prompt_key, pairs.response_key]):
            check_text_pairs(check, pairs)
    else:
        for check in column_checks(path, [columns.messages_key]):
            check_conversations(check, columns.messages_key)


def check_checkpoint(
    resume_mode: str, resume_from_path: str | None, run_folder: str, tells: bool = True
) -> Path | None:
    """Return the complete checkpoint that the run resumes from; with ``tells``, name the checkpoints that it replaces.

    Raises: WrongInput naming the folder, CheckpointError naming the tracker file, or WrongSetting when
        ``auto`` finds complete checkpoints and none that the tracker names.
    """
    root = Path(run_folder).expanduser().absolute()
    if resume_mode == "disable":
        if tells:
            tell_replaced(root, None)
        return None
    folder = resume_from_path or find_latest_ckpt_path(root)
    if folder is None:
        refuse_unnamed(root)
        return None
    found = Path(folder).expanduser()
    problems = verify_checkpoint(found)
    if problems:
        raise damaged_checkpoint(folder, problems, ANOTHER)
    if tells:
        tell_replaced(root, found)
    return found
