"""Score generated responses: ``python -m verl.trainer.main_eval data.path=responses.parquet``.

Every row holds a list of responses. The score of a row is the mean over its responses, that of a data source the mean
over its rows. A response that takes longer than ``scoring.timeout_s`` gets ``scoring.failure_score`` and is counted; if
that is null, the lowest score that the scorer states, else the smaller of 0 and the lowest score of its data source.
"""

import inspect
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from omegaconf import DictConfig
from tqdm import tqdm

from verl.base_config import ConfigError, Violation, parse_node
from verl.errors import DataError, RewardError
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.keys import tree_of
from verl.trainer.config.rules.files import data_file_rules
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run.inputs import check_remote
from verl.utils.dataset.files import ColumnCheck, is_list, is_text, localize, read_parquet, written_rows
from verl.utils.json_types import Json, JsonObject

BATCHES_PER_CORE = 4
MIN_BATCH_ROWS = 8  # a process takes seconds for its imports
MAX_BATCH_ROWS = 256
NO_PROGRESS_TIMEOUT_S = 7200

logger = logging.getLogger(__name__)

Scorer = Callable[..., Any]  # user code: takes any keywords, returns a number or a dict


@dataclass(frozen=True)
class Row:
    """One row of the file, as a scorer sees it."""

    number: int
    data_source: str
    responses: list[str]
    ground_truth: Json
    extra_info: JsonObject | None


@dataclass(frozen=True)
class RowScore:
    """The scores of the responses of a row, and the number of them that were not scored in time."""

    given: list[float]
    timed_out: int = 0

    def mean(self, failure_score: float = 0.0) -> float:
        """Return the mean over all responses."""
        return fmean([*self.given, *[failure_score] * self.timed_out])


def run_eval(config: DictConfig) -> None:
    """Score all rows on Ray and log ``{"test_score/<source>": mean}`` to standard output."""
    from verl.trainer.run.launch import run_offline
    from verl.trainer.run.refusal import checked, end_of_checks
    from verl.utils.observe.console import get_console

    tree = tree_of(config.ray_kwargs)
    cluster, wrong_cluster = parse_node(tree, RayConfig, "ray_kwargs")
    path, rows, scorer = checked(lambda: prepare(config, wrong_cluster))
    end_of_checks()

    def score() -> None:
        scores = score_on_ray(path, rows, scorer, config.scoring.timeout_s)
        get_console().info(json.dumps(summarise(rows, scores, partial(failure_score, config, scorer))))

    run_offline(cluster, "cpu", score)


def failure_score(config: DictConfig, scorer: Scorer, data_source: str) -> float | None:
    """Return the score of a response that is not scored in time; None if neither key nor scorer states it."""
    from verl.workers.rewards.scoring import ScoringLimits, stated_failure_score

    return stated_failure_score(ScoringLimits(failure_score=config.scoring.failure_score), scorer, data_source)


def prepare(config: DictConfig, wrong: Iterable[Violation] = ()) -> tuple[str, list[Row], Scorer]:
    """Check everything; return the file's path, its rows and the scorer; ``wrong`` holds violations of other nodes.

    Raises: ValueError naming the key, or file, row and column.
    """
    from verl.utils.reward_score import data_source_problem, default_compute_score
    from verl.workers.rewards.loading import get_custom_reward_fn

    violations = [
        *wrong,
        *data_file_rules("data.path", config.data.path, required=True),
        *_scoring_rules(config.scoring),
    ]
    if violations:
        raise ConfigError(violations)
    check_remote({"data.path": [config.data.path]})
    (path,) = localize([config.data.path])
    table = read_parquet(path)
    scorer = get_custom_reward_fn(config)
    rows = [row for check in ColumnCheck.over(path, table) for row in _rows(check, config.data)]
    if scorer is None:
        for row in rows:
            problem = data_source_problem(row.data_source)
            if problem is not None:
                raise DataError(f"{path}, row {row.number}, column {config.data.data_source_key!r}: {problem}")
    return path, rows, scorer or default_compute_score


def _scoring_rules(scoring: DictConfig) -> Iterator[Violation]:
    limit = scoring.timeout_s
    score = scoring.failure_score
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < math.inf:
        yield Violation("scoring.timeout_s", limit, "must be a positive number of seconds")
    is_number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    if score is not None and not is_number:
        yield Violation("scoring.failure_score", score, "must be a finite number")


def _rows(check: ColumnCheck, data: DictConfig) -> Iterator[Row]:
    responses = check.column(data.response_key, "data.response_key")
    wanted = "must be a list of strings, as verl.trainer.main_generation writes it"
    if not is_list(responses.type) or not is_text(responses.type.value_type):
        check.fail(data.response_key, 0, f"{wanted}, got {responses.type}", "data.response_key")
    check.refuse(data.response_key, pc.is_null(responses), f"is null, {wanted}", "data.response_key")
    no_response = pc.equal(pc.list_value_length(responses), 0)
    check.refuse(data.response_key, no_response, f"is empty, {wanted}", "data.response_key")
    check.text(data.data_source_key, "data.data_source_key")
    judged = check.column(data.reward_model_key, "data.reward_model_key")
    if not pa.types.is_struct(judged.type) or "ground_truth" not in [field.name for field in judged.type]:
        check.fail(data.reward_model_key, 0, f"must be a dict with ground_truth, got {judged.type}")
    keys = {data.data_source_key, data.response_key, data.reward_model_key, "extra_info"}
    read = check.table.select([name for name in check.table.column_names if name in keys])
    for number, row in enumerate(written_rows(read), start=check.first_row):
        texts = row[data.response_key]
        if None in texts:
            check.fail(data.response_key, number - check.first_row, "holds a null", "data.response_key")
        truth = (row[data.reward_model_key] or {}).get("ground_truth")
        yield Row(number, row[data.data_source_key], texts, truth, row.get("extra_info"))


# ---- scoring


def score_on_ray(path: str, rows: Sequence[Row], scorer: Scorer, timeout_s: float = 300) -> list[RowScore]:
    """Return the scores of every row, in order.

    Raises: DataError naming file and row when the scorer fails; TimeoutError when no batch ends in two hours.
    """
    import ray

    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    size = min(MAX_BATCH_ROWS, max(MIN_BATCH_ROWS, len(rows) // (cores * BATCHES_PER_CORE)))
    task = ray.remote(num_cpus=1, max_retries=1)(score_rows)
    shared = ray.put(scorer)
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    references = [task.remote(path, batch, shared, timeout_s) for batch in batches]
    sizes = {reference: len(batch) for reference, batch in zip(references, batches, strict=True)}
    pending = list(references)
    with tqdm(total=len(rows), desc="scoring", unit="row") as bar:
        while pending:
            done, pending = ray.wait(pending, timeout=NO_PROGRESS_TIMEOUT_S)
            if not done:
                raise TimeoutError(f"{path}: the scorer has scored no rows for {NO_PROGRESS_TIMEOUT_S} s and may hang")
            ray.get(done)  # raises the first failure, before the other batches end
            bar.update(sum(sizes[reference] for reference in done))
    return [score for part in ray.get(references) for score in part]


def score_rows(path: str, rows: Sequence[Row], scorer: Scorer, timeout_s: float) -> list[RowScore]:
    """Return the scores of the responses of each row; each response has ``timeout_s`` seconds.

    Raises: DataError naming file and row when the scorer raises or does not return a score.
    """
    from verl.utils.process.time_limit import TimeLimitExceeded
    from verl.workers.rewards.scoring import Sample, call_scorer

    takes_extra = _takes_extra_info(scorer)
    found = []
    for row in rows:
        more = {"extra_info": row.extra_info} if takes_extra else {}
        scores: list[float] = []
        late = 0
        for index, text in enumerate(row.responses):
            sample = Sample(index, row.data_source, "", text, row.ground_truth, row.extra_info or {}, len(text))
            try:
                call = partial(scorer, row.data_source, text, row.ground_truth, **more)
                scores.append(call_scorer(call, sample, timeout_s).value)
            except TimeLimitExceeded:
                logger.warning("%s, row %d: response %d took longer than %g s", path, row.number, index, timeout_s)
                late += 1
            except RewardError as error:
                raise DataError(f"{path}, row {row.number}: {error}") from error
        found.append(RowScore(scores, late))
    return found


def _takes_extra_info(scorer: Scorer) -> bool:
    try:
        parameters = inspect.signature(scorer).parameters.values()
    except (TypeError, ValueError):
        return False  # a function written in C may have no signature
    return any(each.name == "extra_info" or each.kind is each.VAR_KEYWORD for each in parameters)


def summarise(
    rows: Sequence[Row], scores: Sequence[RowScore], failure_score_of: Callable[[str], float | None]
) -> dict[str, float]:
    """Return the mean score of each data source, and its number of responses that took too long, if any."""
    by_source: dict[str, list[RowScore]] = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        by_source[row.data_source].append(score)
    means: dict[str, float] = {}
    late: dict[str, float] = {}
    for source, found in sorted(by_source.items()):
        failed = failure_score_of(source)
        if failed is None:
            failed = min([0.0, *(value for score in found for value in score.given)])
        means[f"test_score/{source}"] = fmean(score.mean(failed) for score in found)
        late[f"timed_out/{source}"] = sum(score.timed_out for score in found)
    return means | {name: count for name, count in late.items() if count}


@hydra_main("evaluation")
def main(config: DictConfig) -> None:
    """Score with the composed configuration."""
    run_eval(config)


if __name__ == "__main__":
    import importlib

    # Under the name __main__ Ray could not import the functions in its processes.
    importlib.import_module("verl.trainer.main_eval").main()
