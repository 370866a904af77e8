"""Trajectories of several segments: their rows give what one long row gives, and each trajectory counts once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from examples.tiny_model import byte_tokenizer
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY
from verl.algos.aggregate import SHARE_COLUMN
from verl.algos.config import AlgoConfig
from verl.algos.names import ADV_ESTIMATORS
from verl.experimental.agent_loop.segments import EARLIER_COLUMN
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import phases
from verl.trainer.ppo.conversations import conversations
from verl.trainer.ppo.grouping import Groups
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.records import sample_rows, scored_columns
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.ppo.segments import Joined, Layout, arrange, per_trajectory, placed, segment_rows
from verl.trainer.ppo.shaping import add_rollout_weights, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.state import RunState

SEGMENTS = [[4, 3, 2], [4], [2], [3, 4]]
"""Tokens of the responses of the segments, for two samples of each of two prompts."""
TOTAL = [sum(sizes) for sizes in SEGMENTS]
WIDTH, WIDE, PROMPT = 4, 9, 2
SCORES = [1.0, 0.0, 2.0, -1.0]
ROWS = [(t, sum(sizes[:s]), sum(sizes[: s + 1])) for t, sizes in enumerate(SEGMENTS) for s in range(len(sizes))]
"""(trajectory, first, last) of the tokens of each row."""


def whole_batch() -> DataProto:
    """Return the trajectories in one long row each."""
    generator = torch.Generator().manual_seed(3)
    attended = (torch.arange(WIDE) < torch.tensor(TOTAL).unsqueeze(1)).long()
    mask = attended.clone()
    mask[0, 1] = mask[0, 5] = mask[3, 3] = 0  # what tools said; the last token of each trajectory is sampled
    scores = torch.zeros(4, WIDE)
    scores[range(4), [size - 1 for size in TOTAL]] = torch.tensor(SCORES)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(4, WIDE, generator=generator) * scale

    old = -normal().abs()
    tensors = {
        "prompts": torch.full((4, PROMPT), 5),
        "responses": torch.randint(6, 20, (4, WIDE), generator=generator) * attended,
        "attention_mask": torch.cat([torch.ones(4, PROMPT, dtype=torch.int64), attended], -1),
        "response_mask": mask,
        "token_level_scores": scores,
        "values": normal(),
        "old_log_probs": old,
        "ref_log_prob": old + normal(0.3),
        "rollout_log_probs": torch.where(mask.bool(), (old + normal(0.1)).clamp(max=0), 0.0),
        "reward_baselines": torch.tensor([0.5, 0.5, -0.25, -0.25]),
    }
    columns = {"uid": np.array(["a", "a", "b", "b"], dtype=object), "__num_turns__": np.array([6, 2, 2, 4])}
    return DataProto.from_dict(tensors, columns)


def cut(values: Tensor) -> Tensor:
    """Return (T, WIDE) values as those of the rows (N, WIDTH)."""
    rows = torch.zeros(len(ROWS), WIDTH, dtype=values.dtype)
    for row, (trajectory, first, last) in enumerate(ROWS):
        rows[row, : last - first] = values[trajectory, first:last]
    return rows


def carried(own: float | None = None) -> DataProto:
    """Return the trajectories as an agent loop hands them on; ``own`` is the score of the first of all segments."""
    whole = whole_batch()
    rows = {name: cut(whole.batch[name]) for name in ("responses", "response_mask", "rollout_log_probs")}
    attended = cut(whole.batch["attention_mask"][:, PROMPT:])
    rows["prompts"] = torch.full((len(ROWS), PROMPT), 5)
    rows["attention_mask"] = torch.cat([torch.ones(len(ROWS), PROMPT, dtype=torch.int64), attended], -1)
    rows["input_ids"] = torch.cat([rows["prompts"], rows["responses"]], -1)
    rows["position_ids"] = rows["attention_mask"].cumsum(-1) - 1
    last = [row for row, (t, _, end) in enumerate(ROWS) if end == TOTAL[t]]
    earlier: list[Any] = []
    for trajectory in range(4):
        before = [row for row, (t, _, end) in enumerate(ROWS) if t == trajectory and end < TOTAL[t]]
        tensors = {name: value[before] for name, value in rows.items()}
        scores: list[float | None] = [None] * len(before)
        turns = [[turn(0, int(attended[row].sum()))] for row in before]
        earlier.append({"tensors": tensors, "columns": {TURNS_COLUMN: turns}, "scores": scores} if before else None)
    earlier[0]["scores"][0] = own
    tensors = {name: value[last] for name, value in rows.items()}
    tensors["token_level_scores"] = cut(whole.batch["token_level_scores"])[last]
    tensors["reward_baselines"] = whole.batch["reward_baselines"]
    tensors["sampling_seed"] = torch.arange(4)
    columns = dict(whole.non_tensor_batch)
    columns[EARLIER_COLUMN] = np.fromiter(earlier, dtype=object, count=4)
    columns["reward_model"] = np.array([{"ground_truth": str(t)} for t in range(4)], dtype=object)
    columns["segments"] = np.array([3, None, None, 2], dtype=object)
    return DataProto.from_dict(tensors, columns)


def turn(start: int, end: int) -> dict[str, Any]:
    return {"role": "assistant", "start": start, "end": end, "text": None, "calls": [], "seconds": 1.0}


def in_rows(steps: int = 2, ranks: int = 2, own: float | None = None) -> tuple[DataProto, list[int]]:
    """Return the rows of the segments as two ranks train them, with what the models say, and how to put them back."""
    rows, whole = segment_rows(carried(own)), whole_batch()
    for name in ("values", "old_log_probs", "ref_log_prob"):
        rows.batch[name] = cut(whole.batch[name])
    lengths = rows.batch["attention_mask"].sum(-1).tolist()
    trajectories = rows.non_tensor_batch["__trajectory__"].tolist()
    return placed(rows, arrange(trajectories, lengths, steps, ranks, ranks, balanced=True))


def test_segments_of_a_prompt_stay_on_a_rank() -> None:
    """Eight trajectories of two prompts, of one to three segments, in two mini-batches of three ranks."""
    trajectories = [0, 0, 1, 2, 2, 2, 3, 4, 5, 5, 6, 7, 7]
    prompts = [40] * len(trajectories)
    names = ["ab"[trajectory % 2] for trajectory in trajectories]
    groups = Groups(names, prompts, [5] * len(trajectories))
    lengths = [45] * len(trajectories)
    apart = arrange(trajectories, lengths, 2, 3, 3, True)
    together = arrange(trajectories, lengths, 2, 3, 3, True, groups)

    def places(layout: Layout) -> list[list[list[int]]]:
        """Return the rows by mini-batch and rank."""
        width = len(layout.parts[0]) // 2
        return [[part[at : at + width] for part in layout.parts] for at in (0, width)]

    def prompts_of(layout: Layout) -> int:
        """Count the prompts that the ranks compute."""
        return sum(len({names[row] for row in rows if row < 13}) for step in places(layout) for rows in step)

    for before, after in zip(places(apart), places(together), strict=True):
        assert sorted(sum(before, [])) == sorted(sum(after, []))  # a mini-batch keeps its members
        assert {len(rows) for rows in after} == {len(before[0])}
    assert prompts_of(together) < prompts_of(apart)
    assert arrange(trajectories, lengths, 2, 3, 3, False, groups) == arrange(trajectories, lengths, 2, 3, 3, False)


def test_each_segment_is_a_row() -> None:
    rows = segment_rows(carried())
    columns = rows.non_tensor_batch
    assert columns["__trajectory__"].tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert columns["__segment__"].tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert columns["__segments__"].tolist() == [3, 3, 3, 1, 1, 2, 2]
    whole = whole_batch()
    for name in ("responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(rows.batch[name], cut(whole.batch[name])), name
    assert columns["uid"].tolist() == list("aaaabbb")
    assert rows.batch["token_level_scores"].sum(-1).tolist() == [1, 1, 1, 0, 2, -1, -1]
    assert rows.batch["token_level_scores"][1].tolist() == [0, 0, 1, 0]  # at its last token
    shares = [3 / 7, 2 / 7, 2 / 7, 1, 1, 3 / 6, 3 / 6]
    torch.testing.assert_close(rows.batch[SHARE_COLUMN], torch.tensor(shares, dtype=torch.float64), rtol=0, atol=1e-12)
    assert len(set(rows.batch["sampling_seed"].tolist())) == 7 and rows.batch["sampling_seed"][2] == 0
    assert [each is None for each in columns[EARLIER_COLUMN]] == [True, True, False, True, True, True, False]


@pytest.mark.parametrize(("steps", "ranks"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", [*ADV_ESTIMATORS, "of a user"])
def test_estimators_see_one_long_row(name: str, steps: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantages and returns of all estimators, with the KL in the reward, whatever rows fill the batch."""

    def of_a_user(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
        assert list(index) == ["a", "a", "b", "b"] and len(token_level_rewards) == 4
        advantages = (token_level_rewards.sum(-1, keepdim=True) / response_mask.sum()) * response_mask
        return advantages, advantages * 2

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "of a user", of_a_user)
    rows, back = in_rows(steps, ranks)
    found, expected = (
        compute_advantage(apply_kl_penalty(batch, controller())[0], name, gamma=0.9, lam=0.8)
        for batch in (rows, whole_batch())
    )
    for key in ("advantages", "returns"):
        assert expected.batch[key].any()
        put_back = found.batch[key][back]
        torch.testing.assert_close(put_back[: len(ROWS)], cut(expected.batch[key]), rtol=1e-5, atol=1e-6)  # fp32 sums
        assert not put_back[len(ROWS) :].any()


def test_rows_of_segments_have_their_own_lengths(monkeypatch):
    """Also where the driver has noted those of the trajectories, whose columns stay with the workers."""
    batch = carried()
    attended, width = batch.batch["attention_mask"], batch.batch["responses"].shape[1]
    batch.non_tensor_batch[phases.PROMPT_LENGTH] = attended[:, :-width].sum(-1).numpy()
    batch.non_tensor_batch[phases.RESPONSE_LENGTH] = attended[:, -width:].sum(-1).numpy()
    rows = segment_rows(batch)
    monkeypatch.setattr(phases, "is_lazy", lambda batch: True)
    prompts, responses = phases.lengths_of(rows)
    attended = rows.batch["attention_mask"]
    assert prompts.equal(attended[:, :-width].sum(-1)) and responses.equal(attended[:, -width:].sum(-1))
    noted = batch.non_tensor_batch[phases.RESPONSE_LENGTH][rows.non_tensor_batch["__trajectory__"]].tolist()
    assert noted != responses.tolist()


def controller() -> Any:
    return SimpleNamespace(value=0.25, update=lambda current_kl, n_steps: None)


@pytest.mark.parametrize(
    ("gamma", "lam", "returns"),
    [
        # r = (0, 0, 1), V = (0.5, 0.25, 0.75): the return of each token is the score
        (1.0, 1.0, [[1.0, 1.0], [1.0, 0.0]]),
        # delta = (0.125 - 0.5, 0.375 - 0.25, 1 - 0.75) = (-0.375, 0.125, 0.25); A_t = delta_t + A_(t+1) / 4, so
        # A = (-0.328125, 0.1875, 0.25); returns are A + V
        (0.5, 0.5, [[0.171875, 0.4375], [1.0, 0.0]]),
    ],
)
def test_gae_runs_over_the_segments_by_hand(gamma: float, lam: float, returns: list[list[float]]) -> None:
    """The value after the last token of the first segment is that of the first token of the second one."""
    mask = torch.tensor([[1, 1], [1, 0]])
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # the first is a copy
    tensors = {"response_mask": mask, "token_level_scores": scores, "token_level_rewards": scores}
    columns = {
        "uid": np.array(["a", "a"], dtype=object),
        "__trajectory__": np.array([0, 0]),
        "__segment__": np.array([0, 1]),
        "__segments__": np.array([2, 2]),
        "__shared_score__": np.array([True, False]),
    }
    batch = DataProto.from_dict(tensors | {"values": torch.tensor([[0.5, 0.25], [0.75, 9.0]])}, columns)
    found = compute_advantage(batch, "gae", gamma=gamma, lam=lam)
    torch.testing.assert_close(found.batch["returns"], torch.tensor(returns))


def test_a_score_of_a_segment_is_a_reward_of_its_own() -> None:
    """The loop gave 0.5 to the first segment of a trajectory whose score is 1, and the other has 0: 1.5 against 0."""
    rows, back = in_rows(own=0.5)
    assert rows.batch["token_level_scores"][back].sum(-1)[:4].tolist() == [0.5, 1, 1, 0]
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    found = compute_advantage(rows, "grpo", norm_adv_by_std_in_grpo=False).batch["advantages"][back]
    assert [found[row].max().item() or found[row].min().item() for row in range(4)] == [0.75, 0.75, 0.75, -0.75]
    rows.batch["values"] = torch.zeros_like(rows.batch["values"])
    returns = compute_advantage(rows, "gae").batch["returns"][back]
    assert returns[0, 0] == 1.5 and returns[1, 0] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_are_those_of_whole_trajectories(level: str) -> None:
    algorithm = AlgoConfig(rollout_is=True, rollout_is_threshold=2.0, rollout_is_level=level)
    rows, back = in_rows()
    found, metrics = add_rollout_weights(rows, algorithm)
    expected, wanted = add_rollout_weights(whole_batch(), algorithm)
    weights = expected.batch["rollout_is_weights"] * expected.batch["response_mask"]
    got = (found.batch["rollout_is_weights"] * found.batch["response_mask"])[back]
    torch.testing.assert_close(got[: len(ROWS)], cut(weights))
    assert metrics == pytest.approx(wanted, rel=1e-5)


def test_metrics_count_trajectories() -> None:
    rows, _ = in_rows()
    found, expected = (
        compute_data_metrics(compute_advantage(apply_kl_penalty(batch, controller())[0], "grpo"), use_critic=True)
        for batch in (rows, whole_batch())
    )
    assert found["response_length/mean"] == 5.5 and found["response_length/max"] == 9
    assert found["segments/mean"] == 1.75 and found["segments/max"] == 3 and found["num_turns/mean"] == 3.5
    assert found["response_length/clip_ratio"] == 0.75  # a segment of three trajectories fills its row
    differ = {name for name in expected if name.endswith("clip_ratio")}
    assert {name: found[name] for name in expected.keys() - differ} == pytest.approx(
        {name: expected[name] for name in expected.keys() - differ}, rel=1e-5
    )


def test_mini_batches_have_whole_trajectories() -> None:
    """Eight trajectories in two mini-batches of four, on two ranks; five of them have three segments."""
    sizes = [3, 1, 3, 1, 3, 1, 3, 3]
    trajectories = [t for t, size in enumerate(sizes) for _ in range(size)]
    lengths = [10 + 7 * row % 5 for row in range(len(trajectories))]
    for balanced in (True, False):
        layout = arrange(trajectories, lengths, steps=2, ranks=2, divisor=4, balanced=balanced)
        size = len(layout.order) // 4
        assert len(layout.order) % 4 == 0 and sorted(row for row in layout.order if row >= 0) == list(range(18))
        steps = [
            {
                trajectories[row]
                for rank in range(2)
                for row in layout.order[(2 * rank + step) * size :][:size]
                if row >= 0
            }
            for step in range(2)
        ]
        assert steps[0].isdisjoint(steps[1]) and [len(step) for step in steps] == [4, 4]
        assert len(layout.order) == 20, "ten rows of one, eight of the other, two fill it"
    assert arrange([0, 0, 1], [1, 1, 1], 1, 2, 2, False).order == [0, 1, 2, -1]
    assert len(arrange([0, 0, 1], [1, 1, 1], 1, 1, 6, False).order) == 6


def test_rows_that_fill_a_batch_have_one_token_and_no_weight() -> None:
    rows, back = in_rows(steps=2, ranks=2)
    filling = rows.select_idxs(back[len(ROWS) :])
    assert len(filling) == 1 and filling.non_tensor_batch["__dropped__"].all()
    assert filling.batch["attention_mask"].sum(-1).tolist() == [1] and not filling.batch["response_mask"].any()
    assert filling.batch["position_ids"][filling.batch["attention_mask"].bool()].tolist() == [0]
    assert not filling.batch[SHARE_COLUMN].any() and not filling.batch["token_level_scores"].any()
    assert filling.non_tensor_batch["uid"][0] not in ("a", "b")
    assert len(per_trajectory(rows)) == 4 and not per_trajectory(rows).non_tensor_batch["__dropped__"].any()
    ordered = rows.select_idxs(back[: len(ROWS)])
    assert torch.equal(ordered.batch["response_mask"], cut(whole_batch().batch["response_mask"]))
    joined = Joined(rows)
    assert torch.equal(joined.join(rows.batch["response_mask"]), whole_batch().batch["response_mask"])
    assert joined.total(torch.ones(len(rows))).tolist() == [3, 1, 1, 2]


def test_a_trajectory_that_failed_stays_outside() -> None:
    """The second sample of prompt a has no trajectory: the first has nothing to compare with."""
    batch, whole = carried(), whole_batch()
    for part in (batch, whole):
        part.batch["response_mask"][1] = 0
        part.batch["attention_mask"][1, PROMPT:] = 0
        part.non_tensor_batch["__dropped__"] = np.array([False, True, False, False])
    rows = segment_rows(batch)
    for part in (rows, whole):
        part.batch["token_level_rewards"] = part.batch["token_level_scores"]
        compute_advantage(part, "rloo")
    assert torch.equal(rows.batch["advantages"], cut(whole.batch["advantages"]))
    assert not rows.batch["advantages"][:4].any() and rows.batch["advantages"][4:].any()
    rows.batch["values"] = rows.batch["advantages"]
    assert compute_data_metrics(rows)["response_length/mean"] == pytest.approx((9 + 2 + 7) / 3)


# ---- the trainer


def make_trainer(**changes: Any) -> RayPPOTrainer:
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    tree: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"} | changes,
        "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"ppo_mini_batch_size": 1}},
        "data": {"train_batch_size": 2},
    }
    trainer.config = OmegaConf.create(tree)
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.actor_rollout_wg = SimpleNamespace(world_size=2)
    trainer.ref_policy_wg = trainer.critic_wg = trainer.rm_wg = None
    trainer.ref_in_actor = False
    trainer.state = RunState(seed=1, step=3, row_order=[0, 1, 2, 3])
    return trainer


def test_the_trainer_splits_a_batch() -> None:
    """Two mini-batches of a prompt each: as many with more rows."""
    trainer = make_trainer()
    metrics: dict[str, float] = {}
    batch = trainer.split_segments(carried(), metrics, {})
    assert metrics["segments/rows"] == 7 and metrics["segments/filling_rows"] == 1 and len(batch) == 8
    assert batch.meta_info["num_trajectories"] == 4 and len(batch.meta_info["global_token_num"]) == 8
    assert sum(batch.meta_info["global_token_num"]) == metrics["global_seqlen/mean"] * 2
    back = trainer.state.row_order
    assert batch.non_tensor_batch["__trajectory__"][back].tolist() == [0, 0, 0, 1, 2, 3, 3, -1]
    broken = carried()
    broken.batch["rollout_log_probs"][0, 0] = 1.0
    with pytest.raises(RuntimeError, match="log-probability above 0"):
        make_trainer().split_segments(broken, {}, {})
    last = make_trainer(adv_estimator="gae", use_pf_ppo=True).split_segments(carried(), {}, {})
    assert len(last) == 4 and EARLIER_COLUMN not in last.non_tensor_batch


def test_dumps_and_samples_show_all_segments() -> None:
    tokenizer = byte_tokenizer()
    batch = carried()
    batch.batch["responses"] = torch.full_like(batch.batch["responses"], ord("x"))
    for name in ("prompts", "responses"):
        batch.non_tensor_batch[EARLIER_COLUMN][0]["tensors"][name].fill_(ord("y"))
    batch.non_tensor_batch[TURNS_COLUMN] = np.fromiter([[turn(0, 2)], None, None, None], dtype=object, count=4)
    talk, *others = conversations(batch, tokenizer)
    assert [each["role"] for each in talk] == ["assistant", "segment", "assistant", "segment", "assistant"]
    assert [each["tokens"] for each in talk] == [4, PROMPT, 3, PROMPT, 2] and others[:2] == [None, None]
    assert talk[0]["text"] == tokenizer.decode([ord("y")] * 4) and talk[4]["text"] == tokenizer.decode([ord("x")] * 2)
    rows, back = placed(segment_rows(batch), arrange([0, 0, 0, 1, 2, 3, 3], [1] * 7, 2, 2, 2, True))
    trajectories = per_trajectory(rows.select_idxs(back))
    columns = scored_columns(trajectories, tokenizer, {}, range(4))
    assert columns["scores"] == SCORES and columns["gts"] == ["0", "1", "2", "3"]
    extras = columns["reward_extra_infos_dict"]
    assert extras["turns"][0] == talk and extras["earlier_segments"][1:3] == [None, None]
    assert len(extras["earlier_segments"][0]) == 2 and extras["earlier_segments"][0][0]["output"] == talk[0]["text"]
    samples = sample_rows(trajectories, tokenizer, 4, None)
    assert sorted(sample["tokens"] for sample in samples) == [2, 4, 7, 9]


def test_a_kept_rollout_has_its_segments(tmp_path: Any) -> None:
    rollout = {"n": 2, "skip_dump_dir": str(tmp_path)}
    data = {"train_batch_size": 2}
    trainer = {"experiment_name": "e", "project_name": "p"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": data, "trainer": trainer})
    skip = RolloutSkip(config, SimpleNamespace())
    skip.dump(carried())
    found = segment_rows(skip.try_load())
    assert torch.equal(found.batch["response_mask"], segment_rows(carried()).batch["response_mask"])
