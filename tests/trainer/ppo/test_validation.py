"""Validation without a trainer: samples of a loader, generated and scored by plain functions."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.experimental.agent_loop import rewards
from verl.protocol import DataProto
from verl.trainer.ppo import records, validation
from verl.trainer.ppo.records import dump_generations
from verl.trainer.ppo.validation import choose_samples, collect_samples, repeat_prompts, summarise
from verl.workers.rewards import scoring
from verl.workers.rewards.scoring import Failure, Score, ScoringLimits

TOKENIZER = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(row.tolist()) for row in ids])


def rows(*tokens: int, style: str = "rule") -> dict:
    judged = [{"ground_truth": str(token), "style": style} for token in tokens]
    return {
        "input_ids": torch.tensor(tokens).unsqueeze(-1),
        "reward_model": np.array(judged, dtype=object),
        "data_source": np.array(["s"] * len(tokens), dtype=object),
    }


class Rollout:
    """Answers each prompt twice: with its token, and with the next one."""

    def __init__(self):
        self.first_prompts = []

    def __call__(self, prompts: DataProto, first_prompt: int) -> DataProto:
        self.first_prompts.append(first_prompt)
        batch, seeds = repeat_prompts(prompts, 2, seed=1, step=3, first_prompt=first_prompt)
        assert len(seeds.unique()) == len(batch)
        batch.batch["prompts"] = batch.batch["input_ids"]
        batch.batch["responses"] = batch.batch["input_ids"] + torch.arange(len(batch)).unsqueeze(-1) % 2
        return batch


def reward(data: DataProto, return_dict: bool) -> dict:
    right = (data.batch["responses"] == data.batch["prompts"]).float()
    return {"reward_tensor": right, "reward_extra_info": {"acc": right[:, 0].tolist()}}


def test_samples_of_all_batches_are_collected_and_summarised():
    rollout = Rollout()
    samples = collect_samples([rows(4, 5), rows(6)], rollout, reward, TOKENIZER, step=3)
    assert rollout.first_prompts == [0, 2]
    assert samples.inputs == [f"[{token}]" for token in (4, 4, 5, 5, 6, 6)]
    assert samples.outputs == [f"[{token}]" for token in (4, 5, 5, 6, 6, 7)]
    assert samples.truths == ["4", "4", "5", "5", "6", "6"] and samples.scores == [1.0, 0.0] * 3
    assert len(set(samples.uids)) == 3
    assert summarise(samples)["val-core/s/acc/mean@2"] == 0.5
    chosen = [choose_samples(samples.inputs, samples.outputs, samples.scores, count) for count in (2, 6)]
    assert chosen[0] == chosen[1][:2]


def test_rows_for_a_reward_model_have_no_metrics():
    rollout = Rollout()
    judged = [rows(4, style="model")]
    assert collect_samples(judged, rollout, reward, TOKENIZER, step=3, with_reward_model=True) is None
    assert rollout.first_prompts == []
    assert collect_samples(judged, rollout, reward, TOKENIZER, step=3) is not None


@pytest.mark.parametrize(
    ("batches", "stays"),
    [
        ([rows(4)], [False]),
        ([rows(4), rows(5), rows(6)], [True, True, False]),
        ([rows(3, style="model"), rows(4), rows(5, style="model"), rows(6), rows(7, style="model")], [True, False]),
    ],
)
def test_engines_stay_awake_until_the_last_batch(batches, stays):
    rollout, seen = Rollout(), []

    def generate(prompts: DataProto, first_prompt: int) -> DataProto:
        seen.append(prompts.meta_info["stays_awake"])
        return rollout(prompts, first_prompt)

    collect_samples(batches, generate, reward, TOKENIZER, step=3, with_reward_model=True)
    assert seen == stays


def test_a_validation_reward_function_is_needed():
    with pytest.raises(ValueError, match="val_reward_fn of the trainer is None"):
        collect_samples([rows(4)], Rollout(), None, TOKENIZER, step=3)


# ---- each figure is a function of its own source

SAMPLES = 2
KEY = "task"
RIGHT, WRONG, SILENT, FAILED, UNAVAILABLE, MISSING = range(6)
"""What becomes of a sample; of a silent one the scorer says nothing but the score."""
SCORERS = {
    "number": lambda right: Score(float(right)),
    "dict": lambda right: Score(2.0 * right - 1.0, {"acc": right, "pred": "4" if right else "5"}),
    "text": lambda right: Score(float(right) - 2.0, {"note": "right" if right else "wrong", "length": 3 + right}),
}
"""Data source -> what its scorer returns."""


class Validation:
    """A validation over prompts, each a source with the fates of its two samples; a token names a prompt."""

    limits = ScoringLimits()

    def __init__(self, prompts, batch_size, **limits):
        self.prompts, self.batch_size, self.known = prompts, batch_size, {}
        self.limits = ScoringLimits(**limits)

    def batches(self):
        for at in range(0, len(self.prompts), self.batch_size):
            tokens = range(at, min(at + self.batch_size, len(self.prompts)))
            sources = [self.prompts[token][0] for token in tokens]
            yield rows(*tokens) | {KEY: np.array(sources, dtype=object)}

    def generate(self, prompts, first_prompt):
        batch, _ = repeat_prompts(prompts, SAMPLES, seed=1, step=3, first_prompt=first_prompt)
        tokens = batch.batch["input_ids"]
        samples = torch.arange(len(batch)) % SAMPLES
        batch.batch["prompts"], batch.batch["responses"] = tokens, samples.unsqueeze(-1)
        fates = [self.prompts[token][1][sample] for token, sample in zip(tokens[:, 0].tolist(), samples, strict=True)]
        batch.batch["response_mask"] = torch.tensor([[int(fate != MISSING)] for fate in fates])
        return batch

    def __call__(self, data, return_dict=False):
        scores = []
        for token, sample in zip(data.batch["input_ids"][:, 0].tolist(), data.batch["responses"][:, 0], strict=True):
            source, fates = self.prompts[token]
            score = SCORERS[source](fates[sample] in (RIGHT, SILENT))
            if fates[sample] == SILENT:
                score.extras = {}
            kinds = {FAILED: "timed out", UNAVAILABLE: scoring.UNAVAILABLE}
            if fates[sample] in kinds:
                score = Score(self.limits.failure_score or 0.0, {}, Failure(kinds[fates[sample]], ""))
            scores.append(score)
        values = torch.tensor([[score.value] for score in scores])
        return {"reward_tensor": values, "reward_extra_info": scoring.gather_extras(scores, self.known)}

    def metrics(self):
        samples = collect_samples(self.batches(), self.generate, self, TOKENIZER, step=3, reward_fn_key=KEY)
        return summarise(samples)


def of_source(metrics, source):
    return {name: value for name, value in metrics.items() if name.split("/")[1] == source}


FATES = st.tuples(*[st.integers(RIGHT, MISSING)] * SAMPLES)
PROMPTS = st.lists(st.tuples(st.sampled_from(sorted(SCORERS)), FATES), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_figures_of_a_source_do_not_depend_on_other_rows(prompts, batch_size, order):
    """Nor on the order of the rows, or on the size of a batch."""
    shuffled = random.Random(order.random()).sample(prompts, len(prompts))
    mixed = Validation(shuffled, batch_size).metrics()
    for source in {source for source, _ in prompts}:
        alone = Validation([prompt for prompt in prompts if prompt[0] == source], len(prompts)).metrics()
        assert of_source(mixed, source) == of_source(alone, source)
        if any(fate in (RIGHT, WRONG) for name, fates in prompts if name == source for fate in fates):
            assert (f"val-core/{source}/acc/mean@2" in mixed) == (source == "dict")


@settings(max_examples=30, deadline=None)
@given(PROMPTS, st.sampled_from([FAILED, UNAVAILABLE, MISSING]))
def test_a_failure_is_never_better_than_a_wrong_response(prompts, failure):
    """Only where every other response of a source is right, nobody knows what a wrong one would have got."""
    wrong = [(source, (WRONG, RIGHT)) for source in SCORERS] + prompts
    worse = [(source, (failure, RIGHT)) for source in SCORERS] + prompts
    known = [(source, (WRONG, WRONG)) for source in SCORERS]
    one, other = (Validation([*known, *each], 4).metrics() for each in (wrong, worse))
    for name, value in one.items():
        if name.endswith(("acc/mean@2", "reward/mean@2", "best@2/mean")) and "/length/" not in name:
            assert other[name] <= value + 1e-12, name


def test_failures_in_validation_by_hand():
    """A source of scores 0 and -1 to which nobody states the lowest one, and one whose responses are missing."""
    prompts = [("dict", (RIGHT, FAILED)), ("dict", (WRONG, MISSING)), ("number", (MISSING, UNAVAILABLE))]
    metrics = Validation(prompts, 1).metrics()
    assert metrics["val-core/dict/acc/mean@2"] == 0.25
    assert metrics["val-aux/dict/reward/mean@2"] == (1 - 1 - 1 - 1) / 4
    assert metrics["val-core/number/acc/mean@2"] == metrics["val-core/number/reward/mean@2"] == 0.0
    assert (metrics["val-aux/dict/reward/failed"], metrics["val-aux/dict/reward/failed_ratio"]) == (2, 0.5)
    assert metrics["val-aux/number/reward/failed_ratio"] == 1.0 and metrics["val-aux/reward/failed"] == 4
    # the majority of a prompt with one answer and one failure is either of them, with the mean of both
    assert 0.2 < metrics["val-core/dict/acc/maj@2/mean"] < 0.3
    written = Validation(prompts, 2, failure_score=-5.0).metrics()
    assert written["val-aux/dict/reward/mean@2"] == (1 - 5 - 1 - 5) / 4
    assert written["val-core/number/reward/mean@2"] == -5.0


def test_a_scorer_states_its_lowest_score():
    def stated(data, return_dict=False):
        failed = [None if fine else "raised" for fine in (data.batch["responses"] == data.batch["prompts"])[:, 0]]
        scores = torch.tensor([[1.0 if reason is None else -2.0] for reason in failed])
        return {"reward_tensor": scores, "reward_extra_info": {"reward_failure": failed}}

    stated.lowest_score = -2.0
    rollout = Rollout()

    def generate(prompts, first_prompt):
        batch = rollout(prompts, first_prompt)
        batch.batch["response_mask"] = (batch.batch["prompts"] != 6).long()
        return batch

    samples = collect_samples([rows(4, 5), rows(6)], generate, stated, TOKENIZER, step=3)
    assert samples.scores == [1.0, -2.0, 1.0, -2.0, -2.0, -2.0]
    assert samples.extras["reward_failure"] == [None, "raised", None, "raised", "missing", "missing"]


@pytest.fixture
def warnings_are_new():
    for module in (records, rewards, validation):
        module._warn_once.cache_clear()


@pytest.mark.parametrize("styles", [["rule"] * 3, ["rule", "model", "rule"], ["model", "rule", "rule"]])
@pytest.mark.parametrize("size", [1, 3])
def test_each_row_has_its_own_style(styles, size):
    judged = [rows(token, style=style) for token, style in enumerate(styles)]
    batches = judged if size == 1 else [{name: np.concatenate([r[name] for r in judged]) for name in judged[0]}]
    for batch in batches:
        batch["input_ids"] = torch.as_tensor(batch["input_ids"])
    samples = collect_samples(batches, Rollout(), reward, TOKENIZER, step=3, with_reward_model=True)
    truths = [str(token) for token, style in enumerate(styles) if style == "rule" for _ in range(2)]
    assert samples.truths == truths
    assert summarise(samples)["val-core/s/acc/mean@2"] == 0.5


def test_prompts_with_one_uid_are_merged_with_a_notice(warnings_are_new, caplog):
    batch = rows(4, 5) | {"uid": np.array(["a", "a"], dtype=object)}
    for _ in range(2):
        samples = collect_samples([batch | {}], Rollout(), reward, TOKENIZER, step=3)
    assert summarise(samples)["val-core/s/acc/mean@4"] == 0.5
    assert caplog.text.count("makes 1 prompts of the 2 validation prompts") == 1


def test_samples_are_drawn_by_prompt_and_not_by_place():
    """A prompt that comes twice draws twice; other rows, the order and the size of a batch change no seed."""

    def seeds(*batches):
        found = {}

        def generate(prompts, first_prompt):
            tokens = prompts.batch["input_ids"][:, 0].tolist()
            batch, drawn = repeat_prompts(prompts, 2, seed=1, step=3, first_prompt=first_prompt)
            for token, pair in zip(tokens, drawn.view(-1, 2).tolist(), strict=True):
                found.setdefault(token, []).append(pair)
            batch.batch["prompts"] = batch.batch["responses"] = batch.batch["input_ids"]
            return batch

        collect_samples(batches, generate, reward, TOKENIZER, step=3)
        return found

    whole = seeds(rows(4, 5, 4, 6))
    assert len({seed for pairs in whole.values() for pair in pairs for seed in pair}) == 8
    assert seeds(rows(6), rows(4, 5), rows(4)) == whole
    assert {token: pairs for token, pairs in seeds(rows(9, 4), rows(4, 7)).items() if token == 4} == {4: whole[4]}
    other = rows(4) | {"data_source": np.array(["other"], dtype=object)}
    assert seeds(other, rows(4))[4][1] == whole[4][0]


def test_an_extra_with_a_name_of_the_dump_does_not_replace_its_column(warnings_are_new, tmp_path, caplog):
    batch = rows(4)
    turn = {"role": "assistant", "text": "x", "start": 0, "end": 1, "calls": [], "seconds": 0.0}

    def generate(prompts, first_prompt):
        made, _ = repeat_prompts(prompts, 2, seed=1, step=3, first_prompt=first_prompt)
        made.batch["prompts"] = made.batch["responses"] = made.batch["input_ids"]
        made.non_tensor_batch["__turns__"] = np.array([[turn], [turn]] + [None], dtype=object)[:2]
        return made

    names = ("turns", "input", "step", "reward", "uid", "responses", "data_source")
    said = {name: [7, 8] for name in names}

    def talkative(data, return_dict=False):
        return {"reward_tensor": torch.ones(2, 1), "reward_extra_info": dict(said)}

    for _ in range(2):
        samples = collect_samples([batch], generate, talkative, TOKENIZER, step=3)
    assert summarise(samples)["val-core/s/reward/mean@2"] == 1.0
    path = dump_generations(
        tmp_path, 3, samples.inputs, samples.outputs, samples.truths, samples.scores, samples.columns
    )
    first = json.loads(path.read_text().splitlines()[0])
    assert first["turns"][0]["text"] == "x" and (first["step"], first["reward"], first["input"]) == (3, 1.0, "[4]")
    assert {name: first[f"extra/{name}"] for name in names} == dict.fromkeys(names, 7)
    for name in names:
        assert caplog.text.count(f"returns {name!r}") == 1, name
