"""Keys of other versions of verl, and how the command treats each of them.

``ROWS`` is the one table: the command line, files of the user, ``--help``, and the page "Coming from another version"
show or apply it. ``verl.trainer.config.translation`` applies it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

from verl.utils.json_types import Json
from verl.workers.config import ActorConfig

ALIAS = "alias"
ACCEPTED = "accepted"
BUILT = "built"
FEATURE = "feature"
REFUSED = "refused"
"""A key is translated to ours; asks for what this version does anyway; is one of ours; will come; will not come."""

SWITCHES = (".enable", ".enabled", ".enable_switch")
ENGINE_OF_FILES = "model_engine"
"""A group of files there, which chooses the engine that trains."""

Values = Mapping[str, Json]
Read = Callable[[str], Json]
"""Returns the value of one of our keys as the user or a file writes it; None if nobody does."""


class Untranslatable(ValueError):
    """A value that no key of this version can have, with its key."""

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(key, expected)
        self.key = key
        self.expected = expected


@dataclass(frozen=True)
class Translated:
    """Values under the present keys: the requested ones, and implied ones unless the user sets these.

    ``notices`` say of a given key why it has no effect.
    """

    values: Values
    implied: Values = field(default_factory=dict)
    notices: Mapping[str, str] = field(default_factory=dict)


Translator = Callable[[Values, Read], Translated]


@dataclass(frozen=True)
class Row:
    """A key of another version, or a node with all keys below it; ``*`` matches any end of a name.

    ``to`` is our key or node, or a function of all values that are given for the rows that share it. ``accepts`` are
    the values that need nothing; a row that accepts none and is ``accepted`` accepts all, with its ``notice``. With
    ``only`` the row applies to these values of the key. A key that ``is_ours`` is checked by the code that reads it.
    A row with ``roots`` applies to trees that have one of these nodes, a row without ``roots`` to all trees.
    """

    key: str
    decision: str
    meaning: str
    instead: str = ""
    to: str | Translator | None = None
    accepts: tuple[Json, ...] = ()
    only: tuple[Json, ...] = ()
    is_ours: bool = False
    takes_null: bool = False
    notice: str = ""
    roots: tuple[str, ...] = ("actor_rollout_ref",)

    def covers(self, key: str) -> bool:
        """Whether ``key`` is the key of the row, or below it."""
        if "*" in self.key:
            return fnmatchcase(key, self.key)
        return key == self.key or key.startswith(f"{self.key}.")

    def needs_nothing(self, key: str, value: Json) -> bool:
        """Whether a value asks for nothing, or for the present behaviour."""
        is_off = value is None or value == {} or (value is False and key.endswith(SWITCHES))
        takes_all = self.decision == ACCEPTED and not self.accepts
        return is_off or takes_all or any(value == each and type(value) is type(each) for each in self.accepts)

    @property
    def help(self) -> str:
        """The text that ``--help`` shows for the key."""
        return self.message if self.decision in (FEATURE, REFUSED) else f"a key of another version: {self.meaning}"

    @property
    def message(self) -> str:
        """The error for a value that the command does not take."""
        if self.decision == FEATURE:
            text = f"is not in this version yet: {self.meaning}"
            return f"{text}. {self.instead}" if self.instead else f"{text}. Remove it"
        if self.decision == ACCEPTED:
            return f"{self.meaning}: {self.instead}"
        return f"{self.meaning}: {self.instead}" if self.instead else self.meaning


@cache
def _covering(key: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.covers(key))


def row_of(key: str, value: Json = None, roots: Mapping[str, Json] | None = None) -> Row | None:
    """Return the most specific row for a key with this value; None if there is none.

    ``roots`` is the tree that the key belongs to; without it the row of any tree is returned.
    """
    found = [
        row
        for row in _covering(key)
        if (not row.only or value in row.only)
        and (roots is None or not row.roots or any(root in roots for root in row.roots))
    ]
    return max(found, key=lambda row: (row.key.count("."), len(row.key), bool(row.only)), default=None)


_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))


# ---- translations of several keys at once


def _files(given: Values, read: Read) -> Translated:
    """Check that the files that the command composes are those of the engine, dp for FSDP."""
    (engine,) = given.values()
    if engine not in ("dp", "megatron", None):
        raise Untranslatable(ENGINE_OF_FILES, "is not here: write dp (FSDP) or megatron (Megatron-Core)")
    strategy = read(f"{_ACTOR}.strategy")
    if engine is not None and (strategy == "megatron") != (engine == "megatron"):
        expected = f"contradicts the configuration file, which has {_ACTOR}.strategy={strategy}: write one of the two"
        raise Untranslatable(ENGINE_OF_FILES, expected)
    return Translated({})


_CORRECTION = "algorithm.rollout_correction"
_BOUNDS = re.compile(r"(\d*\.?\d+)_(\d*\.?\d+)")


def _correction(given: Values, read: Read) -> Translated:
    """Translate importance weights, with the defaults of their node: a threshold of 2, and no veto."""
    level = given.get(f"{_CORRECTION}.rollout_is")
    threshold = given.get(f"{_CORRECTION}.rollout_is_threshold")
    log_probs: dict[str, Json] = {f"{_ROLLOUT}.calculate_log_probs": True}
    if given.get(f"{_CORRECTION}.bypass_mode"):
        weights: Values = {"algorithm.rollout_is": False, "algorithm.rollout_is_threshold": None}
        return Translated({f"{_ACTOR}.use_rollout_log_probs": True, **weights}, log_probs)
    if level not in (None, "token", "sequence"):
        raise Untranslatable(f"{_CORRECTION}.rollout_is", "must be null, token or sequence")
    if level is None and threshold is None:
        return Translated({"algorithm.rollout_is": False} if f"{_CORRECTION}.rollout_is" in given else {})
    values: dict[str, Json] = {"algorithm.rollout_is": level is not None}
    if level is not None:
        values["algorithm.rollout_is_level"] = level
    values |= _bounds(2.0 if threshold is None else threshold)
    return Translated(values, log_probs | {"algorithm.rollout_is_veto_threshold": None})


def _bounds(threshold: Json) -> dict[str, Json]:
    """Return the present keys for a threshold: a number caps the weights, ``low_high`` sets weights outside to 0."""
    key = f"{_CORRECTION}.rollout_is_threshold"
    bounds = _BOUNDS.fullmatch(str(threshold))
    if bounds is not None:
        low, high = map(float, bounds.groups())
        limits = {"algorithm.rollout_is_threshold_lower": low, "algorithm.rollout_is_threshold": high}
        return limits | {"algorithm.rollout_is_mode": "mask"}
    number = threshold if isinstance(threshold, int | float | str) else ""
    try:
        return {"algorithm.rollout_is_threshold": float(number), "algorithm.rollout_is_mode": "truncate"}
    except ValueError:
        raise Untranslatable(key, "must be a number such as 2.0, or two as low_high, such as 0.5_5.0") from None


_V1 = "trainer.v1"


def _asynchronous(given: Values, read: Read) -> Translated:
    """Translate generation that runs ahead of training, with the defaults of its nodes.

    A step on separate devices trains ``parameter_sync_step`` mini-batches and publishes the weights; so does an update
    here.
    """
    mode = given.get(f"{_V1}.trainer_mode", read(f"{_V1}.trainer_mode"))
    if mode not in ("separate_async", "colocate_async"):
        idle = f"has an effect with {_V1}.trainer_mode=separate_async or colocate_async only"
        return Translated({}, notices=dict.fromkeys(given, idle))
    strategy = given.get(f"{_V1}.sampler.max_off_policy_strategy", "drop")
    if strategy not in ("drop", "wait"):
        raise Untranslatable(f"{_V1}.sampler.max_off_policy_strategy", "must be drop or wait")
    is_separate = mode == "separate_async"
    batches = given.get(f"{_V1}.separate_async.parameter_sync_step", 4)
    values: Values = {
        "async_training.mode": "fully_async" if is_separate else mode,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.staleness_threshold": given.get(f"{_V1}.{mode}.num_warmup_batches", 1),
        "async_training.max_off_policy_threshold": given.get(f"{_V1}.sampler.max_off_policy_threshold", 8),
        "async_training.off_policy_strategy": strategy,
        **({"async_training.require_batches": batches} if is_separate else {}),
    }
    other = "colocate_async" if is_separate else "separate_async"
    idle = f"has an effect with {_V1}.trainer_mode={other} only"
    notices = {key: idle for key in given if key.startswith(f"{_V1}.{other}.")}
    implied: Values = {
        "actor_rollout_ref.hybrid_engine": not is_separate,
        f"{_ROLLOUT}.mode": "async",
        f"{_ROLLOUT}.calculate_log_probs": True,
    }
    return Translated(values, implied, notices=notices)


_SCORING = "reward.reward_manager"


def _reward_manager(given: Values, read: Read) -> Translated:
    """Translate the reward manager: a registered name, or a class in a file."""
    values: dict[str, Json] = {}
    name = given.get(f"{_SCORING}.name")
    source = given.get(f"{_SCORING}.source", "register")
    module = given.get(f"{_SCORING}.module.path")
    if source not in ("register", "importlib"):
        raise Untranslatable(f"{_SCORING}.source", "must be register, or importlib with module.path")
    if source == "importlib" or (module is not None and f"{_SCORING}.source" not in given):
        cls = given.get(f"{_SCORING}.module.name") or name
        if module is None or cls is None:
            missing = "path" if module is None else "name"
            raise Untranslatable(
                f"{_SCORING}.source", f"needs {_SCORING}.module.{missing}: a Python file and its class"
            )
        values["reward_model.reward_manager"] = f"{module}:{cls}"
    elif name is not None:
        values["reward_model.reward_manager"] = name
    return Translated(values)


def _score_processes(given: Values, read: Read) -> Translated:
    """Translate the number of processes that score, for the manager that has several."""
    ((key, number),) = given.items()
    if number is not None and read("reward_model.reward_manager") == "prime":
        return Translated({"reward_model.reward_kwargs.num_processes": number})
    one = "one process scores here, and several do with reward_model.reward_manager=prime"
    return Translated({}, notices={key: one})


def _reward_model(given: Values, read: Read) -> Translated:
    """Translate the keys of the reward model.

    Keys that other versions have below ``reward_model.rollout`` are directly below ``reward_model`` in this version.
    """
    values: dict[str, Json] = {}
    for key, value in given.items():
        name = key.removeprefix("reward.reward_model.").removeprefix("rollout.")
        values["reward_model.model.path" if name == "model_path" else f"reward_model.{name}"] = value
    return Translated(values)


_SKIPPED = ("skip.rollout_tq", "skip.rollout")
_SKIP_KEYS = {
    "enable": "skip_rollout",
    "dump_dir": "skip_dump_dir",
    "steps": "skip_steps",
    "action": "skip_action",
}


def _skip(given: Values, read: Read) -> Translated:
    """Translate the reuse of rollouts."""
    values = {}
    for key, value in given.items():
        name = key.rpartition(".")[2]
        if name not in _SKIP_KEYS:
            raise Untranslatable(key, f"there is no such key: write one of {', '.join(_SKIP_KEYS)}")
        values[f"{_ROLLOUT}.{_SKIP_KEYS[name]}"] = value
    return Translated(values)


def _adamw(given: Values, read: Read) -> Translated:
    """Translate the name of AdamW: Megatron-Core's is adam, and FSDP has no other optimizer."""
    return Translated({key: "adam" for key in given if read(key) is not None})


def _processor(given: Values, read: Read) -> Translated:
    """Translate arguments of the image and video processor; in this version vLLM's key sets them for data sets too."""
    arguments = {key.removeprefix("data.mm_processor_kwargs").lstrip("."): value for key, value in given.items()}
    if read(f"{_ROLLOUT}.name") == "sglang":
        expected = f"write {_ROLLOUT}.engine_kwargs.sglang.mm_process_config, with the nodes image and video"
        raise Untranslatable("data.mm_processor_kwargs", expected)
    node = f"{_ROLLOUT}.engine_kwargs.vllm.mm_processor_kwargs"
    return Translated({f"{node}.{name}": value for name, value in arguments.items() if name})


def _deterministic_engine(given: Values, read: Read) -> Translated:
    """Translate an engine whose responses do not depend on the batch; false keeps the default."""
    return Translated({f"{_ROLLOUT}.batch_invariant": True} if any(given.values()) else {})


# ---- the table


_MERGED = "the engine gets the adapter merged into the weights, which gives the same numbers as the adapter alone"


def _lora(model: str, *roots: str) -> Iterator[Row]:
    """Yield the rows of the LoRA node of a model."""
    names = {"rank": "lora_rank", "alpha": "lora_alpha"}
    names |= {name: name for name in ("target_modules", "exclude_modules") if model != "critic.model" or name[0] == "t"}
    for name, ours in names.items():
        yield Row(f"{model}.lora.{name}", ALIAS, f"LoRA: `{ours}`", to=f"{model}.{ours}", roots=roots)
    merge = f"{model}.lora.merge"
    yield Row(
        merge, ACCEPTED, "what the engine gets of an adapter", "write true or false", accepts=(True,), roots=roots
    )
    yield Row(merge, ACCEPTED, _MERGED, accepts=(False,), only=(False,), notice=_MERGED, roots=roots)
    yield Row(f"{model}.lora", FEATURE, "further options of LoRA: adapter_path, dropout, dtype and others", roots=roots)
    text = "continues an adapter that was trained before"
    yield Row(f"{model}.lora_adapter_path", FEATURE, text, roots=roots)


def _optimizer(node: str, *roots: str) -> Iterator[Row]:
    """Yield the rows of an optimizer."""
    adamw = "write AdamW, the one optimizer of this version"
    names = ("AdamW", "adamw")
    yield Row(f"{node}.optimizer", ALIAS, "AdamW, on every engine", to=_adamw, only=names, roots=roots)
    yield Row(f"{node}.optimizer", REFUSED, "trains by another rule than AdamW", adamw, accepts=("adam",), roots=roots)
    yield Row(f"{node}.muon_*", REFUSED, "options of the optimizer Muon, which is not here", "remove it", roots=roots)
    low = "keeps the state of the optimizer in fewer bits, which FSDP does not do here"
    mcore = f"with Megatron-Core write {node}.override_optimizer_config"
    for name in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg*_dtype"):
        accepts = (False,) if name.startswith("use") else ()
        yield Row(f"{node}.{name}", REFUSED, low, f"remove it; {mcore}", accepts=accepts, roots=roots)


def _engine(node: str, *roots: str) -> Iterator[Row]:
    """Yield the rows of an FSDP engine."""
    text = "torch uses deterministic algorithms in the workers of the role"
    yield Row(f"{node}.full_determinism", BUILT, text, is_ours=True, roots=roots)
    yield Row(
        f"{node}.qat",
        REFUSED,
        "quantization-aware training is not here",
        "write enable=false, or remove it",
        roots=roots,
    )


def _megatron(node: str) -> Iterator[Row]:
    """Yield the rows of a Megatron-Core engine."""
    yield Row(
        f"{node}.megatron.vanilla_mbridge",
        ALIAS,
        "which package builds a model that has no table here: `use_mbridge`",
        to=f"{node}.megatron.use_mbridge",
    )
    yield Row(
        f"{node}.megatron.use_remove_padding",
        ACCEPTED,
        "Megatron-Core always trains on packed sequences here",
        "write true",
        accepts=(True,),
    )
    yield Row(f"{node}.megatron.dtype", ACCEPTED, "dtype of the weights", is_ours=True)
    yield Row(
        f"{node}.megatron.dist_checkpointing_prefix",
        ACCEPTED,
        "names in a checkpoint of Megatron-Core are read without a prefix",
        "write an empty text",
        accepts=("",),
    )


def _weights_route() -> Iterator[Row]:
    node = f"{_ROLLOUT}.checkpoint_engine"
    yield Row(
        f"{node}.update_weights_bucket_megabytes",
        ALIAS,
        "size of one bucket of weights on their way to the engine",
        to=f"{_ROLLOUT}.update_weights_bucket_megabytes",
    )
    yield Row(
        f"{node}.backend",
        FEATURE,
        "sends the changed part of the weights only",
        "Write naive",
        only=("delta", "delta_sharded"),
    )
    yield Row(
        f"{node}.backend",
        ACCEPTED,
        "the weights take one way here: inside a process, or by NCCL or Gloo between processes",
        "write naive or nccl",
        accepts=("naive", "nccl"),
    )
    for name in ("engine_kwargs", "custom_backend_module"):
        text = "the way of the weights takes no options and no module of yours"
        yield Row(f"{node}.{name}", REFUSED, text, "remove it", accepts=({}, ""))


def _named_values() -> Iterator[Row]:
    """Yield named values of present keys that this version does not have yet."""
    losses = {
        ("dppo_tv", "dppo_kl"): "DPPO, which bounds the divergence of whole distributions",
        ("dro",): "DRO, direct reward optimization",
        ("bypass_mode",): "chooses the loss of algorithm.rollout_correction.loss_type",
    }
    for names, text in losses.items():
        yield Row(f"{_ACTOR}.policy_loss.loss_mode", FEATURE, text, "Write another loss", only=names, is_ours=True)
    estimators = {
        ("gdpo",): "GDPO, which normalises each reward before their sum",
        ("optimal_token_baseline", "tir_optimal_token_baseline"): "the baseline of least variance for each token",
    }
    for names, text in estimators.items():
        yield Row("algorithm.adv_estimator", FEATURE, text, "Write another estimator", only=names, is_ours=True)
    text = "several rewards for GDPO"
    yield Row("reward_model.reward_manager", FEATURE, text, "Write another manager", only=("gdpo",), is_ours=True)
    for name in ("gdpo_reward_keys", "gdpo_reward_weights"):
        yield Row(f"algorithm.{name}", FEATURE, "the rewards of GDPO, and their weights")
    text = "the sum of the squared probabilities of each token, for the optimal token baseline"
    yield Row(f"{_ACTOR}.calculate_sum_pi_squared", FEATURE, text, "Write false", accepts=(False,))


def _routing() -> Iterator[Row]:
    text = "training takes the experts that the rollout, or the pass before the update, chose"
    for role in (_ACTOR, _REF):
        yield Row(f"{role}.router_replay.mode", FEATURE, text, "Write disabled", accepts=("disabled",))
        yield Row(f"{role}.router_replay", FEATURE, text)
    yield Row(f"{_ROLLOUT}.enable_rollout_routing_replay", FEATURE, text, "Write false", accepts=(False,))


def _corrections() -> Iterator[Row]:
    weights = "importance weights between rollout and training: `rollout_is`, `rollout_is_level`"
    yield Row(f"{_CORRECTION}.rollout_is", ALIAS, weights, to=_correction, takes_null=True)
    text = (
        "limit of the weights: `rollout_is_threshold`; `low_high` also sets `rollout_is_threshold_lower` and the mode"
    )
    yield Row(f"{_CORRECTION}.rollout_is_threshold", ALIAS, f"{text} `mask`", to=_correction)
    text = "the log-probs of the rollout are the old ones: `actor.use_rollout_log_probs`"
    yield Row(f"{_CORRECTION}.bypass_mode", BUILT, text, to=_correction)
    yield Row(
        f"{_CORRECTION}.loss_type", FEATURE, "REINFORCE with explicit weights", "Write ppo_clip", accepts=("ppo_clip",)
    )
    text = "rejects tokens or sequences whose divergence between rollout and training leaves bounds"
    for name in ("rollout_rs", "rollout_rs_threshold"):
        yield Row(f"{_CORRECTION}.{name}", FEATURE, text)
    text = "divides the weights by their mean over the batch"
    yield Row(f"{_CORRECTION}.rollout_is_batch_normalize", FEATURE, text, "Write false", accepts=(False,))


def _entry_points() -> Iterator[Row]:
    text = "which files the configuration has: `dp` is the default, `megatron` is `--config-name=ppo_megatron_trainer`"
    yield Row(ENGINE_OF_FILES, ALIAS, text, to=_files)
    yield Row("trainer.use_v1", ACCEPTED, "there is one trainer", "write true or false", accepts=(True, False))
    text = "generation on devices of its own: `async_training.mode=fully_async`"
    yield Row(f"{_V1}.trainer_mode", ALIAS, text, only=("separate_async",), to=_asynchronous)
    text = "one step ahead on the same devices in turns: `async_training.mode=colocate_async`"
    yield Row(f"{_V1}.trainer_mode", ALIAS, text, only=("colocate_async",), to=_asynchronous)
    yield Row(f"{_V1}.trainer_mode", ACCEPTED, "there is the mode sync", "write sync", accepts=("sync",))
    for name, text in {
        "colocate_async.num_warmup_batches": "batches sent ahead: `async_training.staleness_threshold`",
        "separate_async.num_warmup_batches": "prompts sent ahead: `async_training.staleness_threshold`",
        "separate_async.parameter_sync_step": "mini-batches of an update: `async_training.require_batches`",
        "sampler.max_off_policy_threshold": "`async_training.max_off_policy_threshold`",
        "sampler.max_off_policy_strategy": "`async_training.off_policy_strategy`",
    }.items():
        yield Row(f"{_V1}.{name}", ALIAS, text, to=_asynchronous)
    for name in ("separate_async.hybrid_rollout", "separate_async.enable_switch"):
        text = "lends devices of the trainer to the rollout while they are idle, which this version does not do"
        yield Row(f"trainer.v1.{name}", REFUSED, text, "write enable_switch=false", accepts=(False,))
    yield Row("separate_async.enable_switch", REFUSED, text, "write false", accepts=(False,))
    text = "a sampler of trajectories of the user's own"
    yield Row(f"{_V1}.sampler", FEATURE, text, "Remove it: groups are trained in the order in which they finish")
    yield Row("ray_kwargs.ray_init", ACCEPTED, "any argument of `ray.init`, passed on", is_ours=True)
    text = "batches are moved by Ray's object store here"
    yield Row("transfer_queue", ACCEPTED, text, notice=text)


def _scoring() -> Iterator[Row]:
    text = "what turns responses into scores: `reward_model.reward_manager`; a class in a file is `file.py:Class`"
    for name in ("source", "name", "module"):
        yield Row(f"{_SCORING}.{name}", ALIAS, text, to=_reward_manager)
    text = "processes that score: `reward_model.reward_kwargs.num_processes` with the manager prime"
    yield Row("reward.num_workers", BUILT, text, to=_score_processes)
    for name in ("path", "name", "reward_kwargs"):
        ours = f"custom_reward_function.{name}"
        text = f"a scorer of yours: `{ours}`"
        yield Row(f"reward.{ours}", ALIAS, text, to=ours, roots=("actor_rollout_ref", "custom_reward_function"))
    text = "a reward model: `reward_model`, where the keys of its engine stand in the node itself"
    yield Row("reward.reward_model", ALIAS, text, to=_reward_model)
    for node in ("reward.sandbox_fusion", "sandbox_fusion"):
        text = "a service that runs code: `reward_model.sandbox_fusion`"
        yield Row(node, ALIAS, text, to="reward_model.sandbox_fusion")


def _generation() -> Iterator[Row]:
    for node in _SKIPPED:
        text = "reuses the responses of an earlier run: `rollout.skip_rollout`, `skip_dump_dir`"
        for name in ("enable", "dump_dir"):
            yield Row(f"{node}.{name}", ALIAS, text, to=_skip)
        yield Row(f"{node}.steps", BUILT, "the steps that do so: `rollout.skip_steps`", to=_skip)
        text = "whether each step has responses, or all have the same: `rollout.skip_action`"
        yield Row(f"{node}.action", BUILT, text, to=_skip)
    yield Row(
        f"{_ROLLOUT}.full_determinism",
        ALIAS,
        "no response depends on others: `rollout.batch_invariant`",
        to=_deterministic_engine,
    )
    for name in ("quantization", "quantization_config_file"):
        yield Row(f"{_ROLLOUT}.{name}", FEATURE, "an engine with weights of fewer bits")
    yield Row(
        f"{_ROLLOUT}.logprobs_mode",
        ACCEPTED,
        "log-probs are those that tokens were drawn from, after temperature and cuts",
        "write processed_logprobs",
        accepts=("processed_logprobs",),
    )
    text = "products on a CPU no longer use packed copies of the weights, which shortened a step by less than 5 %"
    yield Row(f"{_ROLLOUT}.pack_weights", ACCEPTED, text, notice=text)
    yield Row(
        f"{_ROLLOUT}.scheduling_policy",
        ALIAS,
        "the order in which vLLM serves requests: `engine_kwargs.vllm.scheduling_policy`",
        to=f"{_ROLLOUT}.engine_kwargs.vllm.scheduling_policy",
    )
    absent = {
        f"{_ROLLOUT}.disaggregation": "engines that only read prompts and engines that only write",
        f"{_ROLLOUT}.mtp": "drafts of several tokens",
        f"{_MODEL}.mtp": "heads that predict several tokens",
        f"{_MODEL}.tiled_mlp": "layers that are computed in tiles",
    }
    for key, text in absent.items():
        yield Row(key, REFUSED, f"{text} are not here", "write enable=false, or remove it")
    yield Row(
        f"{_ROLLOUT}.prometheus.enable",
        ALIAS,
        "exports metrics, those of the engines too: `trainer.prometheus`",
        to="trainer.prometheus",
    )
    for name in ("port", "file", "served_model_name"):
        text = "Ray exports the metrics, at ports that its agents choose and in its own file of targets"
        yield Row(f"{_ROLLOUT}.prometheus.{name}", REFUSED, text, "remove it")
    for name, text in {
        "project_name": "project of the traces; null: that of the trainer",
        "experiment_name": "run in the traces; null: that of the trainer",
        "max_samples_per_step_per_worker": "traces of one step and worker; null: all",
    }.items():
        yield Row(f"{_ROLLOUT}.trace.{name}", BUILT, text, is_ours=True)
    yield Row(
        f"{_ROLLOUT}.multi_turn.function_tool_path", BUILT, "a Python file whose functions are tools", is_ours=True
    )


def _data() -> Iterator[Row]:
    tools = {
        "tool_config_path": "the file that describes the tools",
        "function_tool_path": "the file of plain functions",
    }
    for name, text in tools.items():
        ours = f"{_ROLLOUT}.multi_turn.{name}"
        yield Row(f"data.{name}", ALIAS, f"{text}: `rollout.multi_turn.{name}`", to=ours)
    both = ("actor_rollout_ref", "data")
    for name, text in {
        "train_max_samples": "the first rows of the training files only; -1: all",
        "val_max_samples": "the first rows of the validation files only; -1: all",
        "image_patch_size": "side of a patch of the vision tower, in pixels",
    }.items():
        yield Row(f"data.{name}", BUILT, text, is_ours=True, roots=both)
    text = "arguments of the processor of images and videos: `rollout.engine_kwargs.vllm.mm_processor_kwargs`"
    yield Row("data.mm_processor_kwargs", ALIAS, text, to=_processor)
    yield Row("data.audio_key", REFUSED, "there are no models that hear here", "remove it", roots=both)
    text = "supervised training goes on where parts of a chat do not render as the whole"
    yield Row("data.ignore_input_ids_mismatch", BUILT, text, is_ours=True, roots=both[1:])


def _actor() -> Iterator[Row]:
    yield Row(
        f"{_ACTOR}.calculate_entropy",
        ACCEPTED,
        "the entropy is always computed, with the log-probs",
        "write true or false",
        accepts=(True, False),
    )
    yield Row(
        f"{_ACTOR}.entropy_from_logits_chunk_size", BUILT, "rows of logits that are computed at once", is_ours=True
    )
    yield Row(
        f"{_ACTOR}.pad_to_length",
        ACCEPTED,
        "sequences are packed, or padded to the longest of their batch",
        "write false",
        accepts=(False,),
    )
    for name in ("tau_pos", "tau_neg"):
        text = f"temperature of the loss sapo: `actor.policy_loss.{name}`"
        yield Row(f"{_ACTOR}.{name}", ALIAS, text, to=f"{_ACTOR}.policy_loss.{name}")
    yield Row(f"{_ACTOR}.rollout_n", ALIAS, "responses of one prompt: `rollout.n`", to=f"{_ROLLOUT}.n")
    yield Row(
        "algorithm.filter_groups.max_inflight_gen_batches",
        ACCEPTED,
        "one batch of prompts is generated at a time",
        "write 1",
        accepts=(1,),
    )
    for role in (_ACTOR, "critic"):
        text = "a checkpoint is loaded whole, or refused"
        yield Row(f"{role}.checkpoint.strict", ACCEPTED, text, "write true", accepts=(True,))
    yield Row(
        "critic.fsdp", ALIAS, "the engine of the critic: `critic.model.fsdp_config`", to="critic.model.fsdp_config"
    )


def _profiling() -> Iterator[Row]:
    for name, text in {
        "relocate_results": "files of all nodes are gathered in save_path",
        "finish_hook_cmd": "a command that runs after the last profiled step",
        "finish_hook_all_ranks": "whether every rank of the actor runs it",
        "finish_hook_ranks": "the ranks of the actor that run it",
    }.items():
        yield Row(f"global_profiler.{name}", BUILT, text, is_ours=True)
    for role in (_ACTOR, _REF, _ROLLOUT, "critic", "reward_model"):
        node = f"{role}.profiler.tool_config.torch"
        for name, text in {
            "contents": "what torch's profiler records, all but `stack`, with which it can stop a worker",
            "discrete": "one trace for each task instead of each step",
            "skip_first": "mini-batches before the cycles of torch's profiler",
            "wait": "mini-batches of each cycle without a record",
            "warmup": "mini-batches of each cycle whose record is thrown away",
            "active": "mini-batches of each cycle that are recorded",
            "repeat": "cycles; 0: to the end",
        }.items():
            yield Row(f"{node}.{name}", BUILT, text, is_ours=True)


_DISTILLATION = "on-policy distillation: a teacher scores what the policy samples"

_OLDER_NAMES = {
    **{f"{_ACTOR}.{key}": text for key, text in ActorConfig._replaced.items()},
    "actor_rollout_ref.profiler": "was divided: write actor_rollout_ref.actor.profiler, actor_rollout_ref.ref.profiler",
    "global_profiler.tool_config": "was divided: write global_profiler.global_tool_config for nsys and torch_memory, "
    "and for npu and torch the role's key, such as actor_rollout_ref.actor.profiler.tool_config",
    "trainer.controller_nsight_options": "moved: write global_profiler.global_tool_config.nsys."
    "controller_nsight_options",
    "trainer.npu_profile": "was replaced: write global_profiler.tool=npu, actor_rollout_ref.actor.profiler.enable=true "
    "and actor_rollout_ref.actor.profiler.tool_config.npu",
    "trainer.profile_continuous_steps": "moved: write global_profiler.profile_continuous_steps",
    "trainer.profile_steps": "moved: write global_profiler.steps, and global_profiler.tool",
    "trainer.worker_nsight_options": "moved: write global_profiler.global_tool_config.nsys.worker_nsight_options",
}
"""Keys of earlier versions, and what replaces them."""

_OFF = {f"{_ACTOR}.tis_imp_ratio_cap": (-1, -1.0)}
"""Their values that asked for what nobody needs to write."""


def _older_names() -> Iterator[Row]:
    for key, text in _OLDER_NAMES.items():
        meaning, _, instead = text.partition(": ")
        yield Row(key, REFUSED, meaning, instead, accepts=_OFF.get(key, ()), roots=())


ROWS: tuple[Row, ...] = (
    *_entry_points(),
    *_scoring(),
    *_corrections(),
    Row("distillation", FEATURE, _DISTILLATION, "Write distillation.enabled=false"),
    *_routing(),
    *_named_values(),
    *_generation(),
    *_weights_route(),
    *(row for node in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config") for row in _engine(node, "actor_rollout_ref")),
    *_engine("critic.model.fsdp_config", "actor_rollout_ref"),
    *_engine("engine", "engine"),
    *_lora(_MODEL, "actor_rollout_ref"),
    *_lora("critic.model", "actor_rollout_ref"),
    *_lora("model", "engine", "use_remove_padding"),  # use_remove_padding: sft_trainer has no node engine
    *_data(),
    *_actor(),
    *_optimizer(f"{_ACTOR}.optim", "actor_rollout_ref"),
    *_optimizer("critic.optim", "actor_rollout_ref"),
    *_optimizer("optim", "engine"),
    *(row for node in (_ACTOR, _REF, "critic") for row in _megatron(node)),
    *_profiling(),
    *_older_names(),
)
"""What the command does with each key; of two rows for a key the longer one counts."""
