"""Sixty wrong commands by the stage of the checks that must find each; ten commands that are wrong in all stages."""

from collections.abc import Mapping
from typing import Any

from .wrong_input_cases import CASES
from .wrong_inputs import Case, Place, Words

STAGES: dict[str, tuple[str, ...]] = {
    "keys and types": (
        "config: trainer.total_epochs=1.5",
        "config: a key that does not exist",
        "config: text instead of a switch",
        "config: a list instead of a name",
        "config: a key that was replaced",
        "config: twenty mistakes",
        "config: trainer.seed=one",
        "config: actor.entropy_coeff=nan",
        "config: actor.optim.lr=nan",
        "config: a word where a number goes",
    ),
    "values": (
        "config: a negative learning rate",
        "config: a misspelled loss aggregation",
        "config: training at temperature 0",
        "config: an unknown KL",
        "reward: a function that is not in the file",
        "reward: too few parameters",
        "reward: no time to score",
        "config: a folder of the rollouts that is a file",
        "config: algorithm.gamma=1.5",
        "config: rollout.top_p=0",
    ),
    "machine": (
        "config: a tracker that is not installed",
        "config: training on GPUs without one",
        "environment: VERL_PROGRESS=loud",
        "environment: VERL_AUTO_PADDING=maybe",
        "environment: VERL_DATAPROTO_SERIALIZATION_METHOD=xml",
        "environment: VERL_FILE_LOGGER_PATH=/dev/null/a.jsonl",
        "environment: VERL_FILE_LOGGER_ROOT=/dev/null",
        "environment: TMPDIR=/dev/null",
        "environment: VERL_CHECK_PHASES=maybe",
        "config: an unknown tracker",
    ),
    "data": (
        "data: no row",
        "data: fewer rows than a batch",
        "data: messages without a role",
        "data: a row without ground truth",
        "data: no data_source column",
        "data: a bad row among the validation rows",
        "data: text as extra_info",
        "data: a reward_fn_key that no file has",
        "data: an image_key that no file has",
        "data: text that is not UTF-8",
    ),
    "models": (
        "model: no weights",
        "model: truncated weights",
        "model: a tokenizer that does not exist",
        "model: a reward model that does not exist",
        "model: a chat template with an error",
        "model: an index that names missing files",
        "model: no chat template",
        "model: garbage in pytorch_model.bin",
        "model: a model.safetensors that is a pipe",
        "model: a truncated config.json",
    ),
    "checkpoint and your code": (
        "code: an estimator that its module registers by another name",
        "code: a tool of a misspelled class",
        "code: an interaction of a misspelled class",
        "code: a loss that its module registers by another name",
        "code: an agent loop of a misspelled class",
        "checkpoint: a path without a step number",
        "checkpoint: a tracker that holds no number",
        "checkpoint: a folder that does not exist",
        "checkpoint: a misspelled resume mode",
        "code: a module that its package does not have",
    ),
}
"""Stage -> ids of cases; the first of each stage make one command, the second the next."""

_BY_ID = {case.id: case for case in CASES}
COMBINED: list[dict[str, Case]] = [
    {stage: _BY_ID[ids[number]] for stage, ids in STAGES.items()} for number in range(10)
]


def combined(cases: Mapping[str, Case], flags: Mapping[str, str] = {}, command: str = "verl.trainer.main_ppo") -> Case:
    """Return one case that is wrong in all that the given ones are."""

    def make(place: Place) -> Words:
        merged: dict[str, Any] = dict(flags)
        for stage, case in cases.items():
            part = Place(place.folder if case.group == "code" else place.folder / stage.split()[0], place.workspace)
            part.folder.mkdir(exist_ok=True)
            chosen = case.make(part) if callable(case.make) else case.make
            assert isinstance(chosen, Mapping), f"{case.id} is a line of words"
            if case.group == "checkpoint":
                chosen = {"trainer.default_local_dir": part.folder / "run", **chosen}
            both = chosen.keys() & merged.keys()
            assert all(chosen[key] == merged[key] for key in both), f"{case.id} and another one set {both}"
            merged |= chosen
        return merged

    says = []
    for stage, case in cases.items():
        at = "{at}" if case.group == "code" else f"{{at}}/{stage.split()[0]}"
        says += [part.replace("{at}", at) for part in case.says if not part.endswith("problems:")]
    environment = {name: value for case in cases.values() for name, value in case.environment.items()}
    return Case(
        "combined", " + ".join(case.name for case in cases.values()), make, tuple(says), "", command, environment
    )
