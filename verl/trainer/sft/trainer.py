"""The supervised trainer: engine, data, loop, validation, checkpoints and outputs of one process."""

import importlib.util
import inspect
import itertools
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.base_config import ConfigError, Violation
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.trainer.config.keys import tree_of
from verl.trainer.config.sft import EACH_EPOCH, TrainerOptions, as_engine_tree, parse_sft_config
from verl.trainer.run.ending import Ending, EndRequested, Grace, end_interrupted, exit_code
from verl.trainer.run.output import RankReport, RunOutput, take_digests
from verl.trainer.run.resume import batches_after
from verl.trainer.run.variables import MEGATRON_ENV_VARS
from verl.trainer.sft.checkpoint import TOKENS_KEY, CheckpointHandler
from verl.trainer.sft.preflight import holds_text_pairs
from verl.utils import envs
from verl.utils.chat_template import check_template, tell_unread_options
from verl.utils.dataset.factory import SeededRandomSampler, load_class
from verl.utils.dataset.loader import loader_processes, stateful_loader
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTDataset, SFTTensorCollator
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group
from verl.utils.flops_counter import FlopsCounter, image_lengths
from verl.utils.import_utils import import_external_libs
from verl.utils.memory_utils import keep_freed_host_memory
from verl.utils.numerics.seeding import seed_process
from verl.utils.observe.console import get_console
from verl.utils.observe.digest import random_state_digest, tensor_digest, weights_digest
from verl.utils.observe.record import Details
from verl.utils.observe.tracking import check_backends
from verl.utils.process.interrupts import going_on, is_of_torchrun
from verl.utils.process.owner import Ownership
from verl.utils.profiler.ranges import marked_timer
from verl.utils.py_functional import object_array
from verl.utils.temporary import remove_folders_of_the_dead
from verl.workers.config import McoreEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.passes import AUX_LOSS, PassSpec, Segment
from verl.workers.roles.accounting import memory_in_use, mfu
from verl.workers.roles.losses import sft_loss

logger = logging.getLogger(__name__)

LOADER_WORKERS = 8
GROUP = "trainer"

Row = dict[str, Any]
"""A row of a data set, by column."""


def create_sft_dataset(
    data_paths: str | list[str],
    data_config: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    processor: ProcessorMixin | None = None,
    max_samples: int = -1,
) -> Dataset[Row]:
    """Build the data set of supervised training: the user's class, conversations, or pairs of prompt and response.

    Args: ``max_samples`` is how many of the first rows are used; -1: all.

    Raises: ValueError naming the key of a class that cannot be used, DataError for rows that cannot.
    """
    usual = SFTDataset if holds_text_pairs(data_config) else MultiTurnSFTDataset
    own = load_class(data_config.get("custom_cls"), "data.custom_cls", Dataset, ("path", "name"))
    cls: type[Any] = own or usual
    # A class of the user that derives from pairs of text may take no processor; it then refuses images.
    takes = issubclass(cls, SFTDataset) and "processor" in inspect.signature(cls).parameters
    media = {"processor": processor} if takes or issubclass(cls, MultiTurnSFTDataset) else {}
    limit = {"max_samples": max_samples} if max_samples >= 0 else {}
    return cls(parquet_files=data_paths, tokenizer=tokenizer, config=data_config, **media, **limit)


def padded_batch(rows: Row, pad_token_id: int, marks_predictors: bool = False) -> DataProto:
    """Turn collated rows, jagged or right-padded, into a batch for an engine.

    Every token but the first is a response to the tokens before it: ``responses`` and ``response_mask`` are (B, L - 1).
    With ``marks_predictors`` the ``loss_mask`` marks the positions before the learnt tokens, as ``SFTDataset`` does.
    Rows of a vision-language model also have ``position_ids`` (C, L) and ``multi_modal_inputs``.
    """
    ids = rows["input_ids"]
    mask = rows["loss_mask"]
    if ids.is_nested:
        lengths = ids.offsets().diff()
        ids = torch.nested.to_padded_tensor(ids, pad_token_id)
        mask = torch.nested.to_padded_tensor(mask, 0)
    else:
        lengths = rows["attention_mask"].sum(-1)
    width = int(lengths.max())
    columns = torch.arange(width).expand(len(ids), -1)
    attended = columns < lengths.unsqueeze(-1)
    ids = ids[:, :width]
    mask = mask[:, :width]
    media = rows.get("multi_modal_inputs")
    axes = _position_axes(rows.get("position_ids"), width)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attended.long(),
            "position_ids": columns * attended if axes is None else axes,
            "responses": ids[:, 1:],
            "response_mask": (mask[:, :-1] if marks_predictors else mask[:, 1:]) * attended[:, 1:],
        },
        non_tensors={} if media is None else {"multi_modal_inputs": object_array(media)},
    )


def _position_axes(positions: Tensor | Sequence[Tensor] | None, width: int) -> Tensor | None:
    """Return (B, C, width) for rows (C, L) of any length; None for positions with one axis."""
    if positions is None or positions[0].dim() == 1:
        return None
    return torch.stack([F.pad(row[:, :width], (0, max(0, width - row.shape[1]))) for row in positions])


class SupervisedOutput:
    """Publish the metrics of a run."""

    def __init__(
        self, options: TrainerOptions, tree: DictConfig, engine: BaseEngine, rank: int, resumed_step: int, total: int
    ) -> None:
        """Open the outputs of a run of ``total`` steps that continues after ``resumed_step``; 0 starts from scratch."""
        self._engine = engine
        self._rank = rank
        self._digests = options.record_digests
        self._output = RunOutput(options, tree, resumed_step or None, total, describe_step) if rank == 0 else None

    def step(self, metrics: Mapping[str, float], timing: Mapping[str, float], batch: DataProto, step: int) -> None:
        """Publish a step; collective. ``timing`` holds seconds by name, ``step`` those of the training step alone."""
        started = time.perf_counter()
        reports = self._gather(self._report(timing["step"], batch))
        seconds = time.perf_counter() - started
        if self._output is None:
            return
        throughput = metrics["train/global_tokens"] / max(timing["step"], 1e-9) / len(reports)
        times = {f"timing_s/{name}": spent for name, spent in timing.items()}
        times |= {"timing_s/train_batch": timing["step"], "timing_s/record": seconds, "perf/throughput": throughput}
        details: Details = {}
        if self._digests:
            batches: dict[str, str] = {}
            for report in reports:
                found = report["digests"].pop("batch")
                batches |= {f"{name}, rank {report['rank']}": digest for name, digest in found.items()}
            details["phases"] = {"batch": batches} | take_digests({GROUP: reports})
        details["workers"] = {GROUP: [*reports]}
        self._output.log(metrics, step, details, times, finished=True)

    def add(self, timing: Mapping[str, float], step: int) -> None:
        """Add to the record the seconds spent after a step."""
        if self._output is not None:
            self._output.record.log({f"timing_s/{name}": seconds for name, seconds in timing.items()}, step)

    def close(self, report: bool = True) -> None:
        """Close the outputs and write the ``report``, also if the run has failed."""
        if self._output is not None:
            self._output.close(report=report)

    def _report(self, seconds: float, batch: DataProto) -> RankReport:
        """Return this rank's part of the record of a step."""
        report: RankReport = {"rank": self._rank, "seconds": {"train_batch": seconds}, "memory": memory_in_use()}
        if self._digests:
            tensors = tensors_of(batch)
            report["digests"] = {
                "batch": {name: tensor_digest(value.cpu()) for name, value in sorted(tensors.items())},
                "weights": weights_digest(self._engine.local_parameters()),
                "random_state": random_state_digest(),
            }
        return report

    def _gather(self, report: RankReport) -> list[RankReport]:
        """Return the reports of all ranks."""
        if not torch.distributed.is_initialized():
            return [report]
        reports = [report] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, report)
        return reports


def describe_step(metrics: Mapping[str, float]) -> list[str | None]:
    """Return the losses as the display shows them; None keeps the value of an earlier step."""
    return [
        f"{name} {metrics[key]:.4f}" if key in metrics else None
        for name, key in (("train", "train/loss"), ("val", "val/loss"))
    ]


class SFTTrainer:
    """One process of a supervised run; all processes of it construct and fit together.

    Args: the composed ``sft_trainer_engine`` tree, or the older ``sft_trainer``.
    Raises: ValueError naming the dotted key, or file, row and column, of a value that cannot be used.
    """

    def __init__(self, config: DictConfig) -> None:
        self._check_device(config.trainer.device)
        self.config = settings = parse_sft_config(config, envs.integer("WORLD_SIZE", 1))
        self.tree = as_engine_tree(config)
        check_backends(settings.trainer.logger)
        distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        seed_process(settings.trainer.seed, "sft", self.rank)
        import_external_libs(settings.model.external_lib)
        self.tokenizer = settings.model.tokenizer
        if self.rank == 0:
            options = tree_of(self.tree.data.apply_chat_template_kwargs)
            tell_unread_options(options, self.tokenizer.chat_template)
            check_template(options, self.tokenizer.chat_template)
        # Reading the data before the model shows its errors sooner.
        self.train_dataset = self._dataset(settings.data.train_files, settings.data.train_max_samples)
        files = settings.data.val_files
        most = settings.data.val_max_samples
        self.val_dataset = self._dataset(files, most) if files else None
        self._plan()
        settings.optim.total_training_steps = self.total_steps
        self.engine: BaseEngine = EngineRegistry.new(
            model_type="language_model",
            backend=settings.engine.strategy,
            model_config=settings.model,
            engine_config=settings.engine,
            optimizer_config=settings.optim,
            checkpoint_config=settings.checkpoint,
        )
        self.engine.initialize()
        self.train_loader = self._loader(self.train_dataset, train=True)
        self.val_loader = None if self.val_dataset is None else self._loader(self.val_dataset, train=False)
        self.checkpoints = CheckpointHandler(
            self.engine,
            self.train_loader,
            default_local_dir=settings.trainer.default_local_dir,
            max_ckpt_to_keep=settings.trainer.max_ckpt_to_keep,
            default_hdfs_dir=settings.trainer.default_hdfs_dir,
            resume_mode=settings.trainer.resume_mode,
            resume_from_path=settings.trainer.resume_from_path,
            trusted_classes=settings.trainer.trusted_classes,
        )
        self.flops = FlopsCounter(settings.model.hf_config, adapters=self.engine.adapter_sizes)
        self._has_warned = False
        self.loss_fn = partial(sft_loss, None)

    # ---- start

    @staticmethod
    def _check_device(device: str) -> None:
        if device != get_device_name():
            expected = f"this machine has {get_device_name()}: write trainer.device={get_device_name()}"
            if device == "npu" and importlib.util.find_spec("torch_npu") is None:
                expected = f"needs the package torch_npu, which is not installed: install it; {expected}"
            raise ConfigError([Violation("trainer.device", device, expected)])

    def _dataset(self, files: str | list[str], max_samples: int) -> Dataset[Row]:
        # A data set of the user reads keys that this trainer does not know, so it gets the tree.
        dataset = create_sft_dataset(
            files, self.tree.data, self.tokenizer, processor=self.config.model.processor, max_samples=max_samples
        )
        self.marks_predictors = isinstance(dataset, SFTDataset)
        return dataset

    def _plan(self) -> None:
        """Set the steps per epoch and in total."""
        data = self.config.data
        trainer = self.config.trainer
        rows = len(self.train_dataset)  # type: ignore[arg-type]
        self.steps_per_epoch = rows // data.train_batch_size
        if not self.steps_per_epoch:
            expected = f"is more than the {rows} training rows"
            raise ConfigError([Violation("data.train_batch_size", data.train_batch_size, expected)])
        self.total_steps = trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs

    def _loader(self, dataset: Dataset[Row], train: bool) -> StatefulDataLoader:
        ranks = self.engine.get_data_parallel_size()
        rank = self.engine.get_data_parallel_rank()
        rows = len(dataset)  # type: ignore[arg-type]
        sampler: Sampler[int]
        if train:
            sampler = SeededRandomSampler(dataset, self.config.trainer.seed, rank=rank, num_replicas=ranks)  # type: ignore[arg-type]
        else:
            # A pass of the engine is collective, so every rank takes equally many rows: some ranks repeat a row, and
            # ``validate`` masks the repetition.
            count = -(-rows // ranks)
            dataset = torch.utils.data.Subset(dataset, [(rank + i * ranks) % rows for i in range(count)])
            sampler = SequentialSampler(dataset)
        return stateful_loader(
            dataset,
            batch_size=self.config.data.train_batch_size // ranks,
            sampler=sampler,
            drop_last=train,
            num_workers=0 if get_device_name() == "cpu" else loader_processes(LOADER_WORKERS),
            collate_fn=SFTTensorCollator(self.config.data.pad_mode),
            # Creating an iterator draws the seed of its workers; the global generator must keep its restored state.
            generator=torch.Generator().manual_seed(self.config.trainer.seed),
        )

    # ---- the loop

    def fit(self) -> None:
        """Train to the last step with validation and checkpoints; continue from a checkpoint if there is one."""
        step = self.checkpoints.load_checkpoint()
        output = SupervisedOutput(self.config.trainer, self.tree, self.engine, self.rank, step, self.total_steps)
        self.total_tokens: int = self.checkpoints.run_state.get(TOKENS_KEY, 0)
        restored_from = self.checkpoints.restored_from
        first = self.train_loader if restored_from is None else batches_after(restored_from, self.train_loader)
        epochs = itertools.chain([first], itertools.repeat(self.train_loader))
        batches = (self._padded(rows) for epoch in epochs for rows in epoch)
        is_interrupted = False
        try:
            while step < self.total_steps:
                step += 1
                self._step(next(batches), step, output)
                is_last = step == self.total_steps
                ends = not is_last and self._is_to_end()
                self._save(step, output, ends)
                if ends:
                    raise EndRequested(f"SIGTERM: the run ends after step {step} of {self.total_steps}")
            self.checkpoints.finish_checkpoint()
        except (KeyboardInterrupt, EndRequested):
            is_interrupted = True
            raise
        finally:
            output.close(report=not is_interrupted)

    grace: Grace | None = None
    """The time after SIGTERM in which the run saves, if it has some."""

    def _is_to_end(self) -> bool:
        """Whether SIGTERM has asked a rank to end the run after this step; collective if the run saves then."""
        if self.grace is None or self.config.trainer.save_on_sigterm_s is None:
            return False
        asked = torch.tensor(float(self.grace.has_begun), device=get_device_name())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        return bool(asked)

    def _step(self, batch: DataProto, step: int, output: SupervisedOutput) -> None:
        """Train on a batch, validate if it is due, and publish the metrics."""
        timing: dict[str, float] = {}
        with marked_timer("step", timing):
            metrics = self._train_step(batch)
        self.total_tokens += int(metrics["train/global_tokens"])
        metrics["train/total_tokens(B)"] = self.total_tokens / 1e9
        if self.val_loader is not None and self._due(self.config.trainer.test_freq, step):
            with marked_timer("testing", timing):
                metrics["val/loss"] = self.validate()
        output.step(metrics, timing, batch, step)

    def _save(self, step: int, output: SupervisedOutput, ends: bool) -> None:
        """Save if it is due, or if the run ``ends`` before its last step."""
        self.checkpoints.finish_checkpoint(wait=False)
        if ends and self.rank == 0:
            get_console().info("SIGTERM: the run saves step %d and ends", step)
        if ends or self._due(self.config.trainer.save_freq, step):
            timing: dict[str, float] = {}
            with marked_timer("save_checkpoint", timing):
                self.checkpoints.save_checkpoint(step, {TOKENS_KEY: self.total_tokens})
            output.add(timing, step)
        if ends:
            self.checkpoints.finish_checkpoint()

    def _padded(self, rows: Row) -> DataProto:
        return padded_batch(rows, self.tokenizer.pad_token_id, self.marks_predictors)

    def _due(self, frequency: int | str, step: int) -> bool:
        """Whether an action is due after ``step``; every enabled action is due after the last step."""
        every = self.steps_per_epoch if frequency == EACH_EPOCH else int(frequency)
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        self._check_labels(batch)
        self._take_computed()  # drop what a validation has counted
        start = time.perf_counter()
        with self.engine.train_mode():
            metrics = self.engine.train_batch(batch, self.loss_fn, self._pass_spec())
        learning_rate = self.engine.lr_scheduler_step()
        seconds = time.perf_counter() - start
        counts = tensors_of(batch)["attention_mask"].sum(-1)
        tokens = self._sum_over_ranks(counts.sum().double())
        segments, images = self._take_computed()
        if images is None:
            images = image_lengths(batch.non_tensor_batch.get("multi_modal_inputs", ()))
        lengths = counts.tolist()
        shared = [0] * len(counts)
        computed = {}
        if self.engine.shares_prefixes:
            lengths = [until for until, _ in segments]
            shared = [above for _, above in segments]
            own = torch.tensor(sum(lengths) - sum(shared), dtype=torch.float64)
            computed = {"train/computed_tokens": self._sum_over_ranks(own)}
        sharing = self.world_size // self.engine.get_data_parallel_size()
        balance = {f"train/{AUX_LOSS}": metrics[AUX_LOSS]} if AUX_LOSS in metrics else {}
        return computed | {
            "train/loss": metrics["loss"],
            **balance,
            "train/grad_norm": metrics["grad_norm"],
            "train/lr": learning_rate,
            "train/global_tokens": tokens,
            "train/mfu": mfu(self.flops, lengths, seconds, sharing, images, shared=shared),
        }

    def _check_labels(self, batch: DataProto) -> None:
        """Warn once of a step without a token to learn; collective.

        Raises: WrongInput if no row of the training data has one.
        """
        if self._sum_over_ranks(tensors_of(batch)["response_mask"].sum().double()) or self._has_warned:
            return
        rows = len(self.train_dataset)  # type: ignore[arg-type]
        if not any(self._has_label(self.train_dataset[row]) for row in range(rows)):
            raise WrongInput(
                f"data.train_files: none of the {rows} rows has a token to learn, so training would change nothing: "
                "the answers are empty, or cut off at data.max_length: raise it, or write data.truncation=left"
            )
        self._has_warned = True
        logger.warning("no row of a step has a token to learn; data.max_length may cut off the answers")

    def _has_label(self, row: Row) -> bool:
        mask = torch.as_tensor(row["loss_mask"])
        return bool((mask[:-1] if self.marks_predictors else mask[1:]).any())

    def _take_computed(self) -> tuple[list[Segment], list[int] | None]:
        """Return and forget the segments and images that passes of this rank have computed, see ``BaseEngine``."""
        return self.engine.take_segments(), self.engine.take_images()

    def _pass_spec(self) -> PassSpec:
        data = self.config.data
        return PassSpec(data.use_dynamic_bsz, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu)

    def validate(self) -> float:
        """Return the mean negative log-likelihood of the trained tokens of the validation set; NaN without any."""
        assert self.val_loader is not None and self.val_dataset is not None
        ranks = self.engine.get_data_parallel_size()
        rank = self.engine.get_data_parallel_rank()
        own = len(range(rank, len(self.val_dataset), ranks))  # type: ignore[arg-type]
        total = torch.zeros(2, dtype=torch.float64)
        with self.engine.eval_mode():
            for rows in self.val_loader:
                batch = self._padded(rows)
                mask = tensors_of(batch)["response_mask"]
                mask[max(own, 0) :] = 0
                own -= len(batch)
                log_probs = self.engine.infer_batch(batch, self._pass_spec())["log_probs"].double()
                total += torch.stack([-(log_probs * mask).sum(), mask.sum().double()])
        loss, tokens = (self._sum_over_ranks(part) for part in total)
        return loss / tokens if tokens else math.nan

    def _sum_over_ranks(self, value: Tensor) -> float:
        group = self.engine.get_data_parallel_group()
        if group is None:
            return float(value)
        value = value.to(get_device_name())
        parts = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, value, group=group)  # HCCL can gather float64 but not reduce it
        return float(torch.stack(parts).cpu().sum())


def run_sft(config: DictConfig) -> None:
    """Train with a composed configuration, alone or as a process of torchrun; rank 0 owns the output folder.

    Raises: SystemExit after a line on standard error if a signal ends the run.
    """
    world_size = envs.integer("WORLD_SIZE", 1)
    rank = envs.integer("RANK", 0)
    parsed = parse_sft_config(config, world_size)
    options = parsed.trainer
    with Ownership() as owner:
        if envs.integer("LOCAL_RANK", 0) == 0:
            remove_folders_of_the_dead()
        if rank == 0:
            owner.take_folders({"trainer.default_local_dir": options.default_local_dir})
        folder = Path(options.default_local_dir).expanduser().absolute()
        ending = Ending(
            folder, options.resume_mode, options.resume_from_path, options.report, options.save_on_sigterm_s
        )
        grace = Grace(options.save_on_sigterm_s, takes_all=is_of_torchrun())
        if get_device_name() == "cpu":
            keep_freed_host_memory()  # each step takes its activations and gradients again
        if isinstance(parsed.engine, McoreEngineConfig):
            envs.write_default(MEGATRON_ENV_VARS)  # CUDA reads it when it starts
        if world_size > 1:
            initialize_global_process_group()
        leaves_group = True
        try:
            trainer = SFTTrainer(config)
            trainer.grace = grace
            with going_on(grace.begin):
                trainer.fit()
        except (KeyboardInterrupt, EndRequested):
            leaves_group = False  # other ranks may have left: this one does not wait for them
            sys.exit(end_interrupted(ending, grace) if rank == 0 else exit_code())
        finally:  # other ranks must not wait for this one, whatever ends it
            if leaves_group and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
