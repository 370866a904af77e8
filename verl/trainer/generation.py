"""Generate responses for a file of prompts, batch by batch, on a group of rollout workers."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from omegaconf import OmegaConf
from ray.util.placement_group import remove_placement_group
from tqdm import tqdm

from verl.errors import DataError
from verl.protocol import DataProto, pad_dataproto_to_divisor, tensors_of, unpad_dataproto
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config.generation import GenerationConfig
from verl.utils.chat_template import check_template, render_chat, tell_unread_options
from verl.utils.dataset.files import (
    ColumnCheck,
    Row,
    check_prompts,
    check_vision_rows,
    localize,
    read_parquet,
    rows_digest,
    written_rows,
)
from verl.utils.dataset.rl_dataset import truncate
from verl.utils.dataset.vision_utils import (
    Media,
    MediaEncoder,
    MediaError,
    check_media,
    kinds_of,
    model_inputs,
    templater_of,
)
from verl.utils.import_utils import import_external_libs
from verl.utils.numerics.seeding import sampling_seeds
from verl.utils.observe.console import get_console
from verl.utils.py_functional import object_array
from verl.utils.vision.multi_modal import share
from verl.utils.vision.positions import position_ids
from verl.workers.roles import ActorRolloutRefWorker
from verl.workers.rollout.base import STAYS_AWAKE

if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)

COLUMN = "responses"


class Generation:
    """One run of ``main_generation``; the constructor prepares everything but the workers.

    Raises: DataError naming file, row and column.
    """

    processor: "ProcessorMixin | None" = None

    def __init__(self, config: GenerationConfig) -> None:
        import_external_libs(config.model.external_lib)
        self.config = config
        self.rollout = config.rollout
        self.model = config.model
        self.tokenizer = config.model.tokenizer
        (self.path,) = localize([config.data.path])
        self.table = read_parquet(self.path)
        self.output = Path(config.data.output_path).expanduser()
        self.processor = config.model.processor
        self.settings = config.media_settings()
        self.media = None if self.processor is None else MediaEncoder(self.processor, self.settings)
        check_template(
            config.data.apply_chat_template_kwargs, templater_of(self.tokenizer, self.processor).chat_template
        )
        key = config.data.prompt_key
        for check in ColumnCheck.over(self.path, self.table):
            check_prompts(check, key, self.media is None, config.data.apply_chat_template_kwargs)
            check_vision_rows(check, self.settings, kinds_of(self.processor), key)
            check_media(check, self.settings)
        self._give_notices()
        self.prompts = [self._tokens(row, self._messages(row)) for row in range(self.table.num_rows)]
        self._cut_prompts()
        self.done = _Done(self.output.with_name(f".{self.output.name}.part.jsonl"), self._fingerprint())

    def _give_notices(self) -> None:
        """Warn of keys that have no effect on the responses of this run."""
        template = templater_of(self.tokenizer, self.processor).chat_template
        tell_unread_options(self.config.data.apply_chat_template_kwargs, template)
        rollout = self.rollout
        samples = self.config.data.n_samples
        idle = [f"rollout.n={rollout.n} (data.n_samples={samples} counts)"] if rollout.n not in (1, samples) else []
        idle += ["rollout.calculate_log_probs=true (the output holds texts)"] if rollout.calculate_log_probs else []
        if idle:
            logger.warning("without effect: %s", "; ".join(idle))

    def _columns(self, row: int) -> Row:
        """Return the prompt of a row, with its images and videos."""
        read = [self.config.data.prompt_key, *self.settings.media_columns().values()]
        table = self.table.select([name for name in read if name in self.table.column_names])
        return written_rows(table.slice(row, 1))[0]

    def _messages(self, row: int) -> list[Row]:
        columns = self._columns(row)
        messages: list[Row] = columns.pop(self.config.data.prompt_key)
        return messages if self.media is None else self.media.typed(messages, columns)

    def _text(self, row: int, messages: list[Row]) -> str:
        options = {"add_generation_prompt": True, "tokenize": False, **self.config.data.apply_chat_template_kwargs}
        try:
            return render_chat(templater_of(self.tokenizer, self.processor), messages, options)
        except (jinja2.TemplateError, ValueError) as error:  # ValueError: the tokenizer has no template
            column = self.config.data.prompt_key
            raise DataError(f"{self.path}, row {row}, column {column!r}: the chat template: {error}") from error

    def _tokens(self, row: int, messages: list[Row]) -> list[int]:
        """Return the tokens of a prompt, with one placeholder for each image or video."""
        ids: list[int] = self.tokenizer(self._text(row, messages), add_special_tokens=False)["input_ids"]
        return ids

    def _shown(self, row: int) -> tuple[Media, Row]:
        """Return the images and videos of a row, and the processor's output for its prompt; empty for a text."""
        if self.media is None:
            return Media(), {}
        try:
            media = self.media.take(self._columns(row))
            return media, self.media.encode(self._text(row, self._messages(row)), media) if media else {}
        except MediaError as error:
            raise DataError(f"{self.path}, row {row}: {error}") from error

    def _cut_prompts(self) -> None:
        """Cut the beginning of long texts.

        Raises: DataError for a long prompt with images, which a cut would separate from their tokens.
        """
        limit = self.rollout.prompt_length
        for row in range(len(self.prompts)):
            _, encoded = self._shown(row)
            if encoded and (length := encoded["input_ids"].shape[1]) > limit:
                raise DataError(
                    f"{self.path}, row {row}: the prompt has {length} tokens with its images and videos, "
                    f"rollout.prompt_length is {limit}: raise it, or drop the row"
                )
        long = [row for row, ids in enumerate(self.prompts) if len(ids) > limit]
        if long:
            which = f"{len(long)} of {len(self.prompts)} prompts, the first in row {long[0]}"
            logger.warning("%s, exceed rollout.prompt_length=%d and lose their beginning", which, limit)
        self.prompts = [truncate(ids, limit, "left") for ids in self.prompts]

    def _fingerprint(self) -> str:
        """Hash everything that the responses depend on."""
        model = Path(self.model.local_path)
        files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.glob("*.*"))
        rollout = OmegaConf.to_container(self.config.worker.rollout)
        columns = [name for name in self.settings.media_columns().values() if name in self.table.column_names]
        media = rows_digest([self.table.select(columns)]) if self.media is not None and columns else None
        parts = [self.prompts, str(model), files, rollout, self.config.data.n_samples, media]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def run(self) -> None:
        """Generate the missing responses and write the output file.

        Raises: RuntimeError of the worker group when a worker dies.
        """
        self.done.begin()
        left = [row for row in range(len(self.prompts)) if row not in self.done.responses]
        if len(left) < len(self.prompts):
            get_console().info("resumed: %d of %d rows are done", len(self.prompts) - len(left), len(self.prompts))
        if left:
            with self._workers() as workers:
                self._generate_rows(workers, left)
        self._write()

    def _generate_rows(self, workers: RayWorkerGroup, left: Sequence[int]) -> None:
        size = self.config.data.batch_size
        total = len(self.prompts)
        with tqdm(total=total, initial=total - len(left), desc="generating", unit="prompt") as bar:
            for number, start in enumerate(range(0, len(left), size)):
                rows = left[start : start + size]
                with phase("generate_sequences", step=number):
                    self.done.add(rows, self._generate(workers, rows))
                bar.update(len(rows))

    @contextmanager
    def _workers(self) -> Iterator[RayWorkerGroup]:
        """Start the workers; in the end, release their resources in the cluster."""
        trainer = self.config.trainer
        on_cpu = trainer.device == "cpu"
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=not on_cpu, max_colocate_count=1)
        worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=self.config.worker, role="rollout")
        group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, device_name=trainer.device)
        try:
            with phase("init_model"):
                group.init_model()
            yield group
        finally:
            group.kill()
            for placement in pool.pgs or ():
                remove_placement_group(placement)

    def _generate(self, workers: RayWorkerGroup, rows: Sequence[int]) -> list[list[str]]:
        """Return the responses of each row."""
        samples = self.config.data.n_samples
        batch = self._batch(rows)
        batch.meta_info[STAYS_AWAKE] = True  # nothing else uses the devices
        trainer = self.config.trainer
        engines = trainer.nnodes * trainer.n_gpus_per_node // self.rollout.workers_per_engine
        padded, added = pad_dataproto_to_divisor(batch, engines)
        output = unpad_dataproto(workers.generate_sequences(padded), added)
        tensors = tensors_of(output)
        mask = tensors["response_mask"].bool()
        ids = [tokens[kept].tolist() for tokens, kept in zip(tensors["responses"], mask, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [texts[start : start + samples] for start in range(0, len(texts), samples)]

    def _batch(self, rows: Sequence[int]) -> DataProto:
        """Return the left-padded prompts (B, P) of some rows, with their images and the seeds of their samples."""
        columns = [self._prompt(row) for row in rows]
        tensors = {name: torch.stack([each[name] for each in columns]) for name in ("input_ids", "attention_mask")}
        tensors["position_ids"] = torch.stack([each["position_ids"] for each in columns])
        others = [name for name in columns[0] if name not in tensors]
        non_tensors = {name: object_array([each[name] for each in columns]) for name in others}
        share(non_tensors)
        samples = self.config.data.n_samples
        batch = DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)
        repeated = batch.repeat(samples, interleave=True)
        seeds = [sampling_seeds(self.rollout.seed, 0, 1, samples, first_prompt=row) for row in rows]
        tensors_of(repeated)["sampling_seed"] = torch.cat(seeds)
        repeated.meta_info.update(do_sample=self.rollout.do_sample and self.rollout.temperature > 0, validate=False)
        return repeated

    def _prompt(self, row: int) -> Row:
        """Return the columns of a row, as those of a data set for training."""
        media, encoded = self._shown(row)
        ids = encoded["input_ids"][0].tolist() if encoded else self.prompts[row]
        pad = self.rollout.prompt_length - len(ids)
        input_ids = torch.tensor([self.model.pad_token_id] * pad + ids)
        mask = (torch.arange(len(input_ids)) >= pad).long()
        columns: Row = {"input_ids": input_ids, "attention_mask": mask}
        if self.media is None:
            return columns | {"position_ids": position_ids(None, input_ids, mask)}
        columns["position_ids"] = self.media.position_ids(input_ids, mask, encoded)
        seen = {"multi_modal_data": media.as_data(), "multi_modal_inputs": model_inputs(encoded)}
        return columns | {"raw_prompt_ids": self.prompts[row]} | seen

    def _write(self) -> None:
        column = pa.array([self.done.responses[row] for row in range(len(self.prompts))], pa.list_(pa.string()))
        at = self.table.schema.get_field_index(COLUMN)  # -1 if there is no such column
        table = self.table.append_column(COLUMN, column) if at < 0 else self.table.set_column(at, COLUMN, column)
        unfinished = self.output.with_name(f".{self.output.name}.tmp")
        pq.write_table(table, unfinished)
        os.replace(unfinished, self.output)
        self.done.remove()
        number = self.config.data.n_samples
        get_console().info("wrote %d rows with %d responses each to %s", len(self.prompts), number, self.output)


class _Done:
    """The finished responses, in a file that grows by one line per row."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.responses: dict[int, list[str]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and json.loads(lines[0]) == fingerprint:
            for line in lines[1:]:
                try:
                    row, texts = json.loads(line)
                except ValueError:  # the process died while writing this line
                    break
                self.responses[row] = texts
        elif lines:
            logger.warning("%s belongs to another model, file or sampling: all responses are generated again", path)
        self._header = [fingerprint, *([row, texts] for row, texts in self.responses.items())]

    def begin(self) -> None:
        """Replace the file by one that holds only the valid responses."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.tmp")
        unfinished.write_text("".join(f"{json.dumps(each)}\n" for each in self._header), encoding="utf-8")
        os.replace(unfinished, self.path)

    def add(self, rows: Sequence[int], responses: Sequence[list[str]]) -> None:
        """Keep the responses of some rows."""
        with self.path.open("a", encoding="utf-8") as file:
            for row, texts in zip(rows, responses, strict=True):
                self.responses[row] = texts
                file.write(f"{json.dumps([row, texts])}\n")

    def remove(self) -> None:
        """Delete the file, once the output holds everything."""
        self.path.unlink(missing_ok=True)
