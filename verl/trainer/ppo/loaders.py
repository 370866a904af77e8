"""Data loaders of the trainer, and the batches that they yield."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.base_config import omega_conf_to_dataclass
from verl.errors import WrongSetting
from verl.experimental.agent_loop.registry import ONE_TURN
from verl.protocol import DataProto
from verl.trainer.ppo.segments import per_trajectory
from verl.trainer.ppo.state import RunState
from verl.trainer.run.resume import batches_after
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.loader import loader_processes, stateful_loader
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.numerics.seeding import seed_process
from verl.workers.config.engines import media_engine
from verl.workers.config.rollout import serves
from verl.workers.rollout.engine_settings import media_settings

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

logger = logging.getLogger(__name__)

Rows = Mapping[str, Any]
"""A batch as the loader yields it: column name -> tensor or array."""
CollateFn = Callable[..., Rows]


class EndOfDataError(RuntimeError):
    """The last epoch ended before the last step, because steps drew more than one batch each."""


class GivenData(NamedTuple):
    """Parts of the data that the caller has built; None for parts that are still to be built."""

    train_dataset: Dataset[Rows] | None = None
    val_dataset: Dataset[Rows] | None = None
    collate_fn: CollateFn | None = None
    train_sampler: Sampler[int] | None = None


class Data(NamedTuple):
    """Data sets and loaders of a run; without validation files, those of the validation are None."""

    train_dataset: Dataset[Rows]
    val_dataset: Dataset[Rows] | None
    train_loader: StatefulDataLoader
    val_loader: StatefulDataLoader | None


def build_data(
    config: DictConfig,
    data: DataConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    given: GivenData,
) -> Data:
    """Build the data sets and the sampler that were not given, and the loaders.

    Args: ``config`` is the whole tree, because data sets and samplers of users may read keys that DataConfig lacks.
    """
    complete_data_node(config)
    node = config.data
    train_dataset = given.train_dataset
    if train_dataset is None:
        train_dataset = create_rl_dataset(node.train_files, node, tokenizer, processor)
    val_dataset = given.val_dataset
    if val_dataset is None and node.val_files:
        val_dataset = create_rl_dataset(node.val_files, node, tokenizer, processor, is_train=False)
    sampler = given.train_sampler
    if sampler is None:
        sampler = create_rl_sampler(node, train_dataset)
    train = train_loader(data, seed, train_dataset, given.collate_fn, sampler)
    validation = None if val_dataset is None else validation_loader(data, seed, val_dataset, given.collate_fn)
    return Data(train_dataset, val_dataset, train, validation)


def train_loader(
    data: DataConfig, seed: int, dataset: Dataset[Rows], collate_fn: CollateFn | None, sampler: Sampler[int]
) -> StatefulDataLoader:
    """Return the loader of full training batches, in the order of the sampler.

    The loader has at most one process per core that this process may use, and says so if that is fewer than wanted.

    Raises: WrongSetting when the data do not fill one batch.
    """
    assert isinstance(dataset, Sized), "a training set needs a length"
    processes = loader_processes(data.dataloader_num_workers)
    if processes < data.dataloader_num_workers:
        words = "data.dataloader_num_workers=%d: %d processes prepare rows, as many as there are usable cores"
        logger.warning(words, data.dataloader_num_workers, processes)
    loader = stateful_loader(
        dataset,
        batch_size=data.loader_batch_size,
        drop_last=True,
        sampler=sampler,
        num_workers=processes,
        collate_fn=collate_fn or default_collate_fn,
        generator=torch.Generator().manual_seed(seed),
    )
    if not len(loader):
        raise WrongSetting(
            f"data.train_files has {len(dataset)} usable rows, fewer than one batch of "
            f"data.train_batch_size={data.loader_batch_size}"
        )
    return loader


def validation_loader(
    data: DataConfig, seed: int, dataset: Dataset[Rows], collate_fn: CollateFn | None
) -> StatefulDataLoader:
    """Return the loader of the validation set, by default in one batch.

    Raises: WrongSetting when the set has no row.
    """
    assert isinstance(dataset, Sized), "a validation set needs a length"
    if not len(dataset):
        raise WrongSetting("data.val_files has no usable row")
    batch_size = data.val_batch_size or len(dataset)
    batches = -(-len(dataset) // batch_size)
    return stateful_loader(
        dataset,
        batch_size=batch_size,
        shuffle=data.validation_shuffle,
        drop_last=False,
        num_workers=min(loader_processes(data.dataloader_num_workers), batches),
        collate_fn=collate_fn or default_collate_fn,
        generator=torch.Generator().manual_seed(seed),
    )


def complete_data_node(config: DictConfig) -> None:
    """Fill in the keys of ``data`` that data sets read and that other nodes decide.

    These keys are the seed (``trainer.seed`` if it is null); the image limits and processor arguments of the rollout
    engine; whether rows hold the tensors of images, which no rollout in the workers' processes returns; whether rows
    hold the messages of the prompt, which agent loops read; and the tools of prompts, for the filter of long prompts.

    Raises: WrongInput for a file of tools that cannot be used.
    """
    rollout = "actor_rollout_ref.rollout"
    with open_dict(config):
        config.data.return_multi_modal_inputs = True
        if serves(config.actor_rollout_ref.rollout):
            config.data.return_raw_chat = True
        if OmegaConf.select(config, "data.seed") is None:
            config.data.seed = config.trainer.seed
        config.data.limit_images = OmegaConf.select(config, f"{rollout}.limit_images")
        engine = media_engine(OmegaConf.select(config, f"{rollout}.name"))
        options = OmegaConf.select(config, f"{rollout}.engine_kwargs.{engine}") or {}
        config.data.limit_mm_per_prompt, config.data.mm_processor_kwargs = media_settings(engine, options)
        config.data.prompt_tools = _prompt_tools(config)


def _prompt_tools(config: DictConfig) -> dict[str, Any] | None:
    """Return the tools whose descriptions count in the filter of long prompts; None without tools."""
    rollout = config.actor_rollout_ref.rollout
    turns = OmegaConf.select(rollout, "multi_turn") or {}
    has_tools = turns.get("tool_config_path") or turns.get("function_tool_path")
    if not serves(rollout) or not has_tools or not config.data.get("filter_overlong_prompts"):
        return None
    from verl.tools.utils.tool_registry import tools_of

    tools = tools_of(turns)
    schemas = [tool.get_openai_tool_schema().model_dump(exclude_none=True) for tool in tools]
    written = json.dumps(schemas).replace("$", "\\u0024")  # a configuration resolves ${...} in texts
    settings: RolloutConfig = omega_conf_to_dataclass(rollout)
    return {"schemas": written, "default_loop": settings.default_loop, "loops_without": [ONE_TURN]}


def training_rows(loader: Iterable[Rows], state: RunState, total_epochs: int | None) -> Iterator[Rows]:
    """Yield the batches of the training loader, epoch after epoch, and count the epochs in ``state``.

    Each draw starts from a random state that depends only on the step and on the prompts that it drew before.

    Args: ``total_epochs`` is None if the number of steps alone ends the run.
    Raises: EndOfDataError after ``total_epochs``; WrongSetting when the loader yields nothing;
        WrongInput when the loader cannot go on from the state in a checkpoint.
    """
    empty_epochs = 0
    while total_epochs is None or state.epoch < total_epochs:
        drawn = 0
        _seed_draw(state)
        batches = iter(loader) if state.restored_from is None else batches_after(state.restored_from, loader)
        state.restored_from = None
        for rows in batches:
            drawn += 1
            yield rows
            _seed_draw(state)
        state.epoch += 1
        # A loader that was resumed at the end of an epoch yields nothing at first.
        empty_epochs = 0 if drawn else empty_epochs + 1
        if empty_epochs > 1:
            raise WrongSetting("the training loader yields no batch: its sampler or data set has become empty")
    raise EndOfDataError(f"the training data were read {state.epoch} times (trainer.total_epochs)")


def let_learn(loader: StatefulDataLoader, dataset: Dataset[Rows] | None, batch: DataProto) -> None:
    """Let sampler and data set learn from a step, also from the last one, since checkpoints hold their state."""
    sampler = getattr(loader, "sampler", None)  # a fork may have another loader
    for learner, method in ((sampler, "update"), (dataset, "on_batch_end")):
        if hasattr(learner, method):
            getattr(learner, method)(batch=per_trajectory(batch).select())


def _seed_draw(state: RunState) -> None:
    before = (state.prompts_drawn,) if state.prompts_drawn else ()
    seed_process(state.seed, "driver", state.step, *before)
