# ruff: noqa: E501 (one row per key: it is read as a table)
"""Each key of a reward manager and of a recipe changes an advantage, a metric, or what is trained; else it is refused.

The tables of ``tests/trainer/config`` say which code reads a key. Here two values of each key are compared.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from examples.tiny_model import byte_tokenizer
from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer
from recipe.entropy.entropy_ray_trainer import RayEntropyTrainer
from recipe.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from recipe.prime import prime_core_algos
from recipe.prime.config import PRIMERewardModelConfig
from recipe.prime.prime_fsdp_workers import PRIMERewardModelWorker
from recipe.spin.core_algos import pairs_of
from recipe.spin.spin_trainer import RaySPINTrainer
from recipe.sppo.config import SPPOActorConfig
from recipe.sppo.dp_actor import sppo_policy_loss
from recipe.sppo.sppo_ray_trainer import RaySPPOTrainer
from tests.recipe.dapo import test_collect as dapo
from tests.recipe.prime import test_trainer as prime
from tests.trainer.config.recipe_effects import MICRO_BATCHES, MODEL, OF_THE_MODEL, RECIPES
from tests.trainer.config.test_every_key_has_an_effect import keys_of
from verl.base_config import ConfigError, build_node
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.workers.rewards.managers import get_reward_manager_cls
from verl.workers.rewards.signature import MANAGER_KWARGS

LENGTHS, WIDTH = [2, 6, 4, 8], 8


def responses() -> DataProto:
    """Two prompts with two responses each."""
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.arange(4 * WIDTH).view(4, WIDTH) % 90 + 5
    tensors = {
        "prompts": torch.full((4, 2), 7),
        "responses": ids * mask,
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), mask], 1),
    }
    columns = {"data_source": ["own"] * 4, "reward_model": [{"ground_truth": "1"}] * 4, "uid": ["a", "a", "b", "b"]}
    return DataProto.from_dict(tensors, {name: np.array(values, dtype=object) for name, values in columns.items()})


# ---- reward managers


def even(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(len(solution_str) % 3)


@cache
def managed(manager: str, **kwargs: Any) -> str:
    """Scores and extras of a manager, which ``shape`` and the metrics of a step read."""
    buffer = {name.removeprefix("buffer_"): value for name, value in kwargs.items() if name.startswith("buffer_")}
    given: dict[str, Any] = {name: value for name, value in kwargs.items() if not name.startswith("buffer_")}
    if buffer:
        given["overlong_buffer_cfg"] = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": False} | buffer
    made = get_reward_manager_cls(manager)(byte_tokenizer(), 0, even, **given)  # type: ignore[arg-type]
    output: Any = made(responses(), return_dict=True)
    return str((output["reward_tensor"].tolist(), {**output["reward_extra_info"]}))


# fmt: off
MANAGER_KEYS = [
    ("max_resp_len", {"max_resp_len": 8, "buffer_len": 4}, {"max_resp_len": 9, "buffer_len": 4}),
    ("overlong_buffer_cfg.enable", {"max_resp_len": 8, "buffer_enable": True}, {"max_resp_len": 8, "buffer_enable": False}),
    ("overlong_buffer_cfg.len", {"max_resp_len": 8, "buffer_len": 4}, {"max_resp_len": 8, "buffer_len": 6}),
    ("overlong_buffer_cfg.penalty_factor", {"max_resp_len": 8, "buffer_penalty_factor": 1.0}, {"max_resp_len": 8, "buffer_penalty_factor": 2.0}),
    ("overlong_buffer_cfg.log", {"max_resp_len": 8, "buffer_log": True}, {"max_resp_len": 8, "buffer_log": False}),
]
# fmt: on
HOW_FAST = ("num_processes",)
"""Keys of managers that change how fast they are, and no score."""


@pytest.mark.parametrize("key, first, second", MANAGER_KEYS, ids=[key for key, *_ in MANAGER_KEYS])
def test_a_key_of_a_manager_changes_its_scores(key: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert managed("dapo", **first) != managed("dapo", **second)


def test_the_table_has_each_key_of_a_manager() -> None:
    tested = {key.partition(".")[0] for key, *_ in MANAGER_KEYS} | set(HOW_FAST)
    assert tested == {key for keys in MANAGER_KWARGS.values() for key in keys}


# ---- what a manager adds to the score reaches the advantage of each trainer

TRAINERS: dict[str, tuple[type[RayPPOTrainer], dict[str, Any]]] = {
    "main": (RayPPOTrainer, {}),
    "dapo": (RayDAPOTrainer, {}),
    "entropy": (RayEntropyTrainer, {}),
    "one_step_off_policy": (OneStepOffRayTrainer, {}),
    "spin": (RaySPINTrainer, {"_target_": "recipe.spin.config.SPINAlgoConfig"}),
    "sppo": (RaySPPOTrainer, {"_target_": "recipe.sppo.config.SPPOAlgoConfig"}),
}


def shaped(name: str, scores: list[float], **changes: Any) -> list[Any]:
    """Advantages and chosen responses, by the scores of the responses."""
    cls, node = TRAINERS[name]
    trainer: Any = cls.__new__(cls)
    trainer.config = OmegaConf.create({"algorithm": node or {"adv_estimator": "grpo"}})
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.state = RunState(seed=1, step=1, total_steps=2)
    trainer.beta = changes.get("sppo_eta", 1.0)
    batch = responses()
    assert batch.batch is not None
    batch.batch["token_level_scores"] = torch.zeros(4, WIDTH)
    batch.batch["token_level_scores"][:, 0] = torch.tensor(scores)
    batch.non_tensor_batch["acc"] = np.array([1.0, 0.0, 1.0, 1.0], dtype=object)
    tensors: Any = trainer.shape(batch, {}, {}).batch
    return tensors["advantages"].tolist()


@pytest.mark.parametrize("name", TRAINERS)
def test_a_penalty_reaches_the_advantage(name: str) -> None:
    """The outcomes stay the same: only the scores have the penalty."""
    assert shaped(name, [1.0, 0.0, 1.0, 1.0]) != shaped(name, [0.2, 0.0, 0.5, 0.7])


BUFFER = {"enable": True, "len": 4, "penalty_factor": 1.0}


@pytest.mark.parametrize("key", ["overlong_buffer", "reward_kwargs.overlong_buffer_cfg"])
def test_prime_refuses_a_penalty_that_it_does_not_read(key: str) -> None:
    def parse(**changes: Any) -> None:
        tree = OmegaConf.create(prime.make_trainer().config)
        OmegaConf.update(tree, "reward_model.reward_manager", "dapo")
        OmegaConf.update(tree, f"reward_model.{key}", BUFFER | changes, force_add=True)
        build_node(tree.reward_model, PRIMERewardModelConfig)

    parse(enable=False)
    parse(penalty_factor=0.0, log=True)  # it only reports
    with pytest.raises(ConfigError, match=rf"{key}\.enable=true: is not read"):
        parse()


# ---- the keys that recipes add


def kept(**changes: Any) -> Any:
    trainer = prime.make_trainer(**changes)
    return trainer.filter_and_downsample(prime.OUTCOMES, prime.batch_of()).non_tensor_batch["uid"].tolist()


def of_prime(**changes: Any) -> Any:
    metrics: dict[str, float] = {}
    tensors: Any = prime.make_trainer(**changes).shape(prime.batch_of(), metrics, {}).batch
    return tensors["advantages"].tolist(), metrics


def token_scores(**changes: Any) -> Any:
    """The scores that PRIME's reward model gives for the same log-ratios."""
    worker: Any = PRIMERewardModelWorker.__new__(PRIMERewardModelWorker)
    worker.config = prime.make_trainer(**{f"reward_model__{key}": value for key, value in changes.items()}).reward_node
    worker.engine = SimpleNamespace(shares=SimpleNamespace(size=1, group=None))
    batch, ratio = responses(), torch.arange(4.0 * WIDTH).view(4, WIDTH)
    assert batch.batch is not None
    ratio = ratio * batch.batch["response_mask"]
    output: Any = worker._scored(batch, ratio, torch.zeros_like(ratio), {}).batch
    return output["rm_scores"].tolist()


def pair_loss(beta: float = 0.1, smoothing: float = 0.0, kind: str = "sigmoid") -> Any:
    return pairs_of(torch.tensor([0.4, -0.2]), torch.tensor([1, 0]), beta, smoothing, kind).gradient.tolist()


def follows(frequency: int) -> list[bool]:
    trainer: Any = RaySPINTrainer.__new__(RaySPINTrainer)
    trainer.ref_update_freq, trainer.state = frequency, RunState(seed=1)
    return [trainer._reference_is_policy() for trainer.state.step in (1, 2, 3)]


def sppo_loss(eta: float) -> Any:
    config = SPPOActorConfig(sppo_eta=eta, ppo_micro_batch_size_per_gpu=1)
    tokens = torch.tensor([[-1.0, -2.0]])
    found: Any = sppo_policy_loss(tokens, tokens + 0.5, torch.ones(1, 2), torch.ones(1, 2), "token-mean", config)
    return found[0].item()


def drawn(**groups: Any) -> Any:
    try:
        found = dapo.collect_steps(dapo.make_trainer(**groups), until=2)
    except ValueError as error:
        return str(error)
    return [metrics["train/num_gen_batches"] for _, metrics, _ in found]


Compared = tuple[Callable[[], Any], Callable[[], Any]]
PRIME_MODEL = "reward_model__model__"
ANY_LENGTH: dict[str, Any] = {"data__filter_truncate": False, "data__accuracy_upper_bound": 1.0}
# fmt: off
KEYS: dict[str, dict[str, Compared]] = {
    "dapo_trainer": {
        "algorithm.filter_groups.enable": (drawn, lambda: drawn(enable=False)),
        "algorithm.filter_groups.metric": (drawn, lambda: drawn(metric="none_such")),
        "algorithm.filter_groups.max_num_gen_batches": (drawn, lambda: drawn(max_num_gen_batches=1)),
    },
    "prime_trainer": {
        "data.filter_accuracy": (kept, lambda: kept(data__filter_accuracy=False)),
        "data.accuracy_lower_bound": (lambda: kept(**ANY_LENGTH), lambda: kept(data__accuracy_lower_bound=0.0, **ANY_LENGTH)),
        "data.accuracy_upper_bound": (kept, lambda: kept(data__accuracy_upper_bound=1.0)),
        "data.filter_truncate": (lambda: kept(data__filter_accuracy=False), lambda: kept(data__filter_accuracy=False, data__filter_truncate=False)),
        "data.oversample_factor": (kept, lambda: kept(data__oversample_factor=4.0)),
        "algorithm.reward_gt_coef": (of_prime, lambda: of_prime(algorithm__reward_gt_coef=1.0)),
        "algorithm.reward_dpo_coef": (of_prime, lambda: of_prime(algorithm__reward_dpo_coef=1.0)),
        f"{MODEL}.update": (of_prime, lambda: of_prime(**{f"{PRIME_MODEL}update": "none"})),
        f"{MODEL}.loss_type": (lambda: prime_core_algos.checked_outcome(torch.tensor([2.0]), "dpo"), lambda: _refusal(lambda: prime_core_algos.checked_outcome(torch.tensor([2.0]), "ce"))),
        f"{MODEL}.beta_train": (lambda: token_scores(prime_norm="none"), lambda: token_scores(prime_norm="none", model__beta_train=0.5)),
        "reward_model.prime_granularity": (token_scores, lambda: token_scores(prime_granularity="whole")),
        "reward_model.prime_norm": (token_scores, lambda: token_scores(prime_norm="none")),
    },
    "spin_trainer": {
        "actor_rollout_ref.actor.dpo_beta": (pair_loss, lambda: pair_loss(beta=0.5)),
        "actor_rollout_ref.actor.dpo_label_smoothing": (pair_loss, lambda: pair_loss(smoothing=0.2)),
        "actor_rollout_ref.actor.dpo_loss_type": (pair_loss, lambda: pair_loss(kind="ipo")),
        "trainer.ref_update_freq": (lambda: follows(1), lambda: follows(2)),
    },
    "sppo_trainer": {
        "actor_rollout_ref.actor.sppo_eta": (lambda: sppo_loss(1.0), lambda: sppo_loss(2.0)),
        "algorithm.sppo_eta": (lambda: shaped("sppo", [1, 0, 1, 1]), lambda: shaped("sppo", [1, 0, 1, 1], sppo_eta=3.0)),
    },
}
# fmt: on
SIZES = "ulysses_sequence_parallel_size mini_batch_size rollout_n"
ELSEWHERE = {
    "dapo_trainer": ("data.gen_batch_size", "reward_model.overlong_buffer."),
    "prime_trainer": (
        *(f"reward_model.{name}" for name in f"{MICRO_BATCHES} {SIZES}".split()),
        *(f"{MODEL}.{name}" for name in OF_THE_MODEL.split()),
        *(f"{MODEL}.optim.", f"{MODEL}.fsdp_config.", f"{MODEL}.ref_"),
    ),
    "sppo_trainer": ("algorithm.use_kl_in_reward", "algorithm.kl_penalty"),
}
"""Keys, or beginnings of keys, that their engines or the main trainer read: their tests stand in ``recipe_effects``."""


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("recipe, key", [(recipe, key) for recipe, keys in KEYS.items() for key in keys])
def test_a_key_of_a_recipe_changes_what_is_trained(recipe: str, key: str) -> None:
    first, second = KEYS[recipe][key]
    assert str(first()) != str(second())


@pytest.mark.parametrize("recipe", KEYS)
def test_the_table_has_each_key_of_a_recipe(recipe: str) -> None:
    read = {key for reader in RECIPES[recipe].readers for key in keys_of(reader)}
    rest = {key for key in read if not key.startswith(ELSEWHERE.get(recipe, ()) or ("-",))}
    assert rest == set(KEYS[recipe])


def test_recipes_without_an_own_key_stand_in_no_table() -> None:
    # The last two have numbers of devices and the length of the run: see their test_rules.py.
    elsewhere = {"entropy", "fully_async_policy", "one_step_off_policy"}
    own = {name for name, recipe in RECIPES.items() if recipe.readers and Path(recipe.folder).name not in elsewhere}
    assert own - {"dapo_megatron_trainer"} == set(KEYS)


# ---- the warm-up of the critic


def test_the_actor_trains_after_the_warm_up_steps() -> None:
    trainer: Any = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.state = RunState(seed=1)
    alone = {}
    for steps in (0, 2):
        trainer.run_config = RunConfig.parse(OmegaConf.create({"trainer": {"critic_warmup": steps}}))
        alone[steps] = [trainer.trains_critic_only for trainer.state.step in (1, 2, 3, 4)]
    assert alone == {0: [False] * 4, 2: [True, True, False, False]}
