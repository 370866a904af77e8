"""Trajectories that are scored one by one, where they are made, have the scores of a batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from examples.tiny_model import byte_tokenizer
from verl.errors import RewardError
from verl.experimental.agent_loop import rewards
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.rewards import RESERVED, TrajectoryScorer, scores_one_by_one
from verl.protocol import DataProto
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.ppo.phases import PHASES
from verl.trainer.ppo.reward import compute_reward
from verl.workers.rewards.loading import load_reward_manager, reward_kwargs
from verl.workers.rewards.scoring import FAILURE_COLUMN

TOKENIZER = byte_tokenizer()
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise KeyError("nothing to score")
    return {"score": len(solution_str) / 4, "acc": solution_str == ground_truth, "note": extra_info["index"]}
"""
WIDTH = 8


@pytest.fixture
def config(tmp_path: Path) -> DictConfig:
    return config_of(tmp_path)


def config_of(folder: Path, *more: str) -> DictConfig:
    (folder / "score.py").write_text(SCORER)
    overrides = [f"custom_reward_function.path={folder}/score.py", "reward_model.scoring.max_failed_ratio=0.5", *more]
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose("ppo_trainer", overrides)


def batch_of(*texts: str) -> DataProto:
    ids = [TOKENIZER.encode(text) for text in texts]
    responses = torch.tensor([row + [0] * (WIDTH - len(row)) for row in ids])
    attended = torch.tensor([[1] * (1 + len(row)) + [0] * (WIDTH - len(row)) for row in ids])
    columns: dict[str, list[Any]] = {
        "data_source": ["words"] * len(texts),
        "reward_model": [{"ground_truth": "word"}] * len(texts),
        "extra_info": [{"index": row} for row in range(len(texts))],
    }
    arrays = {name: np.fromiter(values, dtype=object, count=len(texts)) for name, values in columns.items()}
    tensors = {"prompts": torch.full((len(texts), 1), 65), "responses": responses, "attention_mask": attended}
    return DataProto.from_dict(tensors | {"response_mask": attended[:, 1:]}, arrays)


def scored_apart(config: DictConfig, batch: DataProto) -> DataProto:
    """Score the first row, then those that have ended meanwhile, and put the scores into the batch as loops do."""
    scorer = TrajectoryScorer(config, TOKENIZER, lambda outputs, requests: requests)
    outputs = [AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[]) for _ in range(len(batch))]

    async def run() -> None:
        await asyncio.gather(*(scorer.add_score([each], batch, row) for row, each in enumerate(outputs)))

    asyncio.run(run())
    scored = batch.select()
    last = batch.batch["response_mask"].sum(-1).sub(1).clamp(min=0)
    scores = torch.zeros(len(batch), WIDTH)
    scores[torch.arange(len(batch)), last] = torch.tensor([output.reward_score for output in outputs])
    scored.batch["rm_scores"] = scores
    names = sorted({name for output in outputs for name in output.extra_fields})
    for name in names:
        column = [output.extra_fields.get(name) for output in outputs]
        scored.non_tensor_batch[name] = np.fromiter(column, dtype=object, count=len(outputs))
    scored.meta_info["reward_extra_keys"] = names
    return scored


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_scores_extras_and_failures_are_those_of_a_batch(tmp_path: Path, manager: str) -> None:
    buffer = ["enable=true", "len=4", "penalty_factor=1.0", "log=true"]
    keys = [f"+reward_model.reward_kwargs.overlong_buffer_cfg.{each}" for each in buffer]
    more = [f"reward_model.reward_manager={manager}"]
    if manager == "dapo":
        more += [*keys, f"+reward_model.reward_kwargs.max_resp_len={WIDTH}"]
    config = config_of(tmp_path, *more)
    whole = load_reward_manager(config, TOKENIZER, num_examine=0, **reward_kwargs(config))
    batch = batch_of("word", "a", "bad", "longer")
    scores, extras = compute_reward(batch, whole)
    apart, extras_apart = compute_reward(scored_apart(config, batch), whole)
    assert torch.equal(apart, scores)
    assert extras_apart == {name: list(values) for name, values in extras.items()}
    assert extras_apart[FAILURE_COLUMN] == [None, None, "raised", None] and extras_apart["acc"][:3] == [
        True,
        False,
        0.0,
    ]


def test_the_trainer_judges_how_many_may_fail(config: DictConfig) -> None:
    manager = load_reward_manager(config, TOKENIZER, num_examine=0)
    with pytest.raises(RewardError, match=r"2 of 3 responses could not be scored \(2 raised\), more than"):
        compute_reward(scored_apart(config, batch_of("bad", "bad", "a")), manager)


def test_samples_are_shown_as_if_the_trainer_had_scored(config: DictConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    compute_reward(scored_apart(config, batch_of("word", "a")), load_reward_manager(config, TOKENIZER, num_examine=1))
    assert [message for message in caplog.messages if "[response] word" in message and "[score] 1.0" in message]


def test_a_score_of_the_loop_is_kept_and_segments_share_one(config: DictConfig) -> None:
    scorer = TrajectoryScorer(config, TOKENIZER, lambda outputs, requests: requests)
    outputs = [AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[]) for _ in range(2)]
    asyncio.run(scorer.add_score(outputs, batch_of("word"), 0))
    assert [output.reward_score for output in outputs] == [1.0, 1.0] and outputs[0].extra_fields["acc"] is True
    known = AgentLoopOutput(prompt_ids=[], response_ids=[], response_mask=[], reward_score=0.25)
    asyncio.run(scorer.add_score([known], batch_of("word"), 0))
    assert known.reward_score == 0.25 and not known.extra_fields


def test_a_scorer_cannot_hide_columns_of_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewards._warn_once.cache_clear()
    config = config_of(tmp_path)
    said = {"score": 1.0, "uid": "x", "segments": 9, "responses": 0, "seen": 2, "messages": 3}
    (tmp_path / "score.py").write_text(f"def compute_score(**kwargs): return {said}")
    output = AgentLoopOutput(
        prompt_ids=[5], response_ids=[6], response_mask=[1], extra_fields={"segments": 2, "messages": []}
    )
    scorer = TrajectoryScorer(config, TOKENIZER, lambda outputs, requests: requests)
    asyncio.run(scorer.add_score([output], batch_of("word"), 0))
    assert output.reward_score == 1.0
    renamed = {"extra/uid": "x", "extra/segments": 9, "extra/responses": 0, "extra/messages": 3}
    assert output.extra_fields == {"segments": 2, "messages": [], "seen": 2, FAILURE_COLUMN: None} | renamed
    written = {name for phase in PHASES.values() for name in phase.writes | phase.optional}
    assert written - RESERVED == {"acc"}  # the managers batch and prime write it too
    for name in ("uid", "segments", "responses", "messages"):
        assert f"the reward function returns '{name}', a column of the trainer" in caplog.text


def test_which_managers_score_one_by_one(config: DictConfig, tmp_path: Path) -> None:
    manager = load_reward_manager(config, TOKENIZER, num_examine=0)
    assert scores_one_by_one(manager)
    assert not scores_one_by_one(type(manager)(TOKENIZER, 0)), "the processes could not make it from the configuration"
    assert not scores_one_by_one(lambda data: None)
    prime = load_reward_manager(config_of(tmp_path, "reward_model.reward_manager=prime"), TOKENIZER, num_examine=0)
    assert not scores_one_by_one(prime)


def test_trajectories_that_wait_are_scored_together_and_one_that_is_wrong_costs_itself(config: DictConfig) -> None:
    sizes = []

    def rows_of(outputs: Sequence[AgentLoopOutput], requests: DataProto) -> DataProto:
        sizes.append(len(outputs))
        if any(output.prompt_ids for output in outputs):
            raise ValueError("its prompt is too long")
        return requests

    scorer = TrajectoryScorer(config, TOKENIZER, rows_of)
    batch = batch_of("word", "a", "longer", "word")
    prompts = [[], [], [1], []]
    outputs = [AgentLoopOutput(prompt_ids=ids, response_ids=[], response_mask=[]) for ids in prompts]

    async def run() -> list[BaseException | None]:
        calls = [scorer.add_score([output], batch, row) for row, output in enumerate(outputs)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [type(None), type(None), ValueError, type(None)]
    assert [output.reward_score for output in outputs] == [1.0, 0.25, None, 1.0]
    assert sizes == [4, 1, 1, 1, 1]
