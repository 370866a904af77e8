"""Models: their folders, their sizes against the run, adapters, and kernels that need a device or a package."""

import importlib.util
from collections.abc import Iterator, Mapping

from verl.algos.names import FULL_KL
from verl.base_config import Violation, as_yaml
from verl.models.transformers.names import LENGTH_ROPES, PACKED, SHARED_FAMILIES
from verl.models.transformers.own_loss import loss_problems
from verl.models.transformers.packing import attention_cap, packing_problem
from verl.models.transformers.prefix_sharing import drawn_in_training, sharing_problems
from verl.trainer.config.rules import remote_code
from verl.trainer.config.run_config import RunConfig
from verl.utils import envs
from verl.utils.engine_versions import has_sglang_kernels
from verl.utils.json_types import Json, mapping_at
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, HFModelConfig
from verl.workers.config.model import (
    architecture_problem,
    field_problems,
    path_problems,
    positions_of,
    quantized_problem,
    read_config_json,
    sglang_problem,
)
from verl.workers.config.overrides import flat_overrides, overridden, override_problems
from verl.workers.config.tokenizer_files import tokenizer_problems, vocabulary_difference

POLICY = "actor_rollout_ref.model"
REFERENCE = "actor_rollout_ref.ref.model"
ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic.model"


# ---- folders and sizes


def model_rules(run: RunConfig, broken: set[str]) -> Iterator[Violation]:
    """Yield model paths that hold no model, and sizes of the model that do not fit the run."""
    shared = run.actor_rollout_ref
    workers = None if broken & {"trainer.n_gpus_per_node", "trainer.nnodes"} else run.trainer.world_size
    policy = shared.model
    critic = run.critic
    models = [(POLICY, policy.path, policy.tokenizer_path, shared.actor.strategy)]
    frozen = {POLICY: f"{ACTOR}.freeze_vision_tower"} if shared.actor.freeze_vision_tower else {}
    adapters = [(POLICY, policy.lora_rank, policy.target_modules)]
    overrides = {POLICY: policy.override_config, REFERENCE: (shared.ref.model or {}).get("override_config") or {}}
    if shared.ref.model_path:
        models.append((REFERENCE, shared.ref.model_path, None, shared.ref.strategy))
    elif shared.ref.model:
        expected = f"is read only together with {REFERENCE}.path: write both, or leave it out"
        yield Violation(REFERENCE, shared.ref.model, expected)
    if critic is not None:
        overrides[CRITIC] = critic.model.override_config
        models.append((CRITIC, critic.model.path, critic.model.tokenizer_path, critic.strategy))
    if isinstance(critic, FSDPCriticConfig):
        adapters.append((CRITIC, critic.model.lora_rank, critic.model.target_modules))
        if critic.model.freeze_vision_tower:
            frozen[CRITIC] = f"{CRITIC}.freeze_vision_tower"
    for key, path, tokenizer, strategy in models:
        if f"{key}.path" in broken:
            continue
        problems = list(path_problems(path)) or list(quantized_problem(read_config_json(path)))
        yield from (Violation(f"{key}.path", path, problem) for problem in problems)
        if problems:
            continue
        hf_config = read_config_json(path)
        if key != REFERENCE:  # the reference uses the tokenizer of the actor
            tokenizer = tokenizer or path
            found = tokenizer_problems(tokenizer, hf_config if key == POLICY else None)
            yield from (Violation(f"{key}.tokenizer_path", tokenizer, text) for text in found)
        if strategy != "megatron":
            yield from vision_rules(hf_config, (f"{key}.path", path), workers)
            if key != CRITIC:
                yield from packing_rules(policy, POLICY, hf_config, run.trainer.device)
            elif isinstance(critic, FSDPCriticConfig):
                yield from packing_rules(critic.model, CRITIC, hf_config, run.trainer.device)
        if critic is not None and key == CRITIC:
            yield from remote_code.trust_rules(
                hf_config, path, f"{CRITIC}.trust_remote_code", critic.model.trust_remote_code
            )
            instead = "choose an estimator without a critic, such as algorithm.adv_estimator=grpo"
            yield from remote_code.value_model_rules(hf_config, f"{CRITIC}.path", path, instead)
        else:
            yield from remote_code.trust_rules(hf_config, path, f"{POLICY}.trust_remote_code", policy.trust_remote_code)
        given = overrides[key]
        changes = flat_overrides(given)
        wrong = [f"has {each}: correct it" for each in field_problems(changes)] if key == POLICY else []
        wrong = wrong or list(override_problems(hf_config, given))
        yield from (Violation(f"{key}.override_config", as_yaml(changes), each) for each in wrong)
        is_text_only = bool(hf_config) and "vision_config" not in hf_config
        if is_text_only and key in frozen:
            expected = f"needs a vision-language model, {key}.path names a text model (no vision_config): write false"
            yield Violation(frozen[key], True, expected)
        if key == POLICY:
            if not policy.external_lib and not envs.read("VERL_USE_EXTERNAL_MODULES"):  # user modules may add models
                yield from (Violation(f"{key}.path", path, problem) for problem in architecture_problem(hf_config))
            yield from tied_adapter_rules(policy, POLICY, hf_config)
            yield from loss_rules(policy, key, hf_config, strategy)
            yield from _size_rules(run, hf_config, broken)
            trust = run.data.trust_remote_code
            yield from remote_code.tokenizer_trust_rules(tokenizer or path, "data.trust_remote_code", trust)
            yield from remote_code.family_rules(run, hf_config)
        elif is_text_only and not list(path_problems(policy.path)) and "vision_config" in read_config_json(policy.path):
            # A text-only model would read the image tokens and not the images.
            expected = "is a text-only model, and the policy of actor_rollout_ref.model.path reads images"
            yield Violation(f"{key}.path", path, f"{expected}: name a vision-language model")
    for key, rank, modules in adapters:
        if rank and not modules:
            expected = "must name modules, or all-linear, with lora_rank above 0"
            yield Violation(f"{key}.target_modules", modules, expected)


def vocabulary_rules(run: RunConfig, use_reference: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield models that read the policy's tokens but have another vocabulary; additional tokens are allowed."""
    shared = run.actor_rollout_ref
    reward = run.reward_model
    policy = shared.model
    readers: dict[str, str | None] = {}
    if use_reference:
        readers[f"{REFERENCE}.path"] = shared.ref.model_path
    if run.critic is not None:
        readers[f"{CRITIC}.path"] = run.critic.model.path
    if reward.enable and reward.model.input_tokenizer is not None:
        readers["reward_model.model.input_tokenizer"] = reward.model.input_tokenizer
    elif reward.enable:
        readers |= {f"reward_model.model.{name}": path for name, path in reward.model.paths.items()}
    key = f"{POLICY}.path" if policy.tokenizer_path in (None, policy.path) else f"{POLICY}.tokenizer_path"
    tokenizer = policy.tokenizer_path or policy.path
    if {f"{POLICY}.path", key} & broken:
        return
    if problem := vocabulary_difference(tokenizer, policy.path, may_lack=True):
        yield Violation(key, tokenizer, f"is not the tokenizer of {POLICY}.path: {problem}: name the model's tokenizer")
    for name, path in readers.items():
        if path is None or name in broken:
            continue
        if problem := vocabulary_difference(tokenizer, path):
            instead = "name the policy's tokenizer"
            if name.endswith("path"):
                instead = "name a model with the policy's tokenizer; if only its files are wrong, save that one there"
            yield Violation(name, path, f"reads the tokens of {key} with another vocabulary: {problem}: {instead}")


def vision_rules(hf_config: Mapping[str, Json], path: tuple[str, str], workers: int | None) -> Iterator[Violation]:
    """Reject a vision-language model of a family that needs a single worker on FSDP.

    Args: ``path`` is a key and its value; ``workers`` is None if their number is not known.
    """
    family = hf_config.get("model_type")
    if "vision_config" in hf_config and family not in SHARED_FAMILIES and workers is not None and workers > 1:
        expected = (
            f"is of model_type {family!r}, which runs on one worker only: a worker without an image would skip its "
            f"vision tower; name a model of {', '.join(SHARED_FAMILIES)}, use one worker, or add the family "
            "(docs/advance/multi_modal.md)"
        )
        yield Violation(*path, expected)


def packing_rules(
    model: Mapping[str, Json], key: str, hf_config: Mapping[str, Json], device: str, trains: bool = True
) -> Iterator[Violation]:
    """Yield attention without a cap that the model needs, and packed rows or shared prefixes that it does not support.

    Padded rows share no prefixes; a notice says so.

    Args: ``key`` is the node of the model, ``hf_config`` its config.json, empty if that is not known yet.
    """
    changes = mapping_at(model, "override_config")
    fields = overridden(hf_config, changes)
    if changes.get("attn_implementation") == "sdpa" and (cap := attention_cap(fields)):
        expected = f"drops {cap}: leave it out, or write eager"
        yield Violation(f"{key}.override_config.attn_implementation", "sdpa", expected)
    if not model["use_remove_padding"]:
        return
    if problem := packing_problem(fields):
        yield Violation(f"{key}.use_remove_padding", True, problem)
    if not model["use_prefix_sharing"]:
        return
    problems = list(sharing_problems(fields, trains))
    if device == "npu":
        problems.append("has no attention for trainer.device=npu: write false")
    if (attention := changes.get("attn_implementation", PACKED)) != PACKED:
        problems.append(f"needs {PACKED} attention: leave attn_implementation={attention} out of override_config")
    yield from (Violation(f"{key}.use_prefix_sharing", True, problem) for problem in problems)


def loss_rules(
    model: Mapping[str, Json], key: str, hf_config: Mapping[str, Json], strategy: str
) -> Iterator[Violation]:
    """Yield terms of a policy's own loss that the engine does not compute.

    Args: ``key`` is the node of the model, ``hf_config`` its config.json, empty if that is not known yet.
    """
    fields = overridden(hf_config, mapping_at(model, "override_config"))
    for name, value, fault in loss_problems(fields, strategy):
        yield Violation(f"{key}.override_config.{name}", value, fault)


def head_rules(
    hf_config: Mapping[str, Json], key: str, size: int, ranks: str, model: str = "model"
) -> Iterator[Violation]:
    """Yield attention heads that do not divide over the ranks that share them."""
    heads = (mapping_at(hf_config, "text_config") or hf_config).get("num_attention_heads")
    if isinstance(heads, int) and size > 1 and heads % size:
        yield Violation(key, size, f"the {model}'s {heads} attention heads do not divide over {size} {ranks}")


def _size_rules(run: RunConfig, hf_config: Mapping[str, Json], broken: set[str]) -> Iterator[Violation]:
    """Yield a context that is too short, heads that do not divide over the ranks that share them, and images."""
    shared = run.actor_rollout_ref
    rollout = shared.rollout
    positions = positions_of(overridden(hf_config, shared.model.override_config))
    lengths = {"actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length"}
    if positions is not None and positions < rollout.prompt_length + rollout.response_length and not broken & lengths:
        expected = (
            f"plus prompts of {rollout.prompt_length} tokens exceeds the model's {positions} positions: write at most "
            f"{positions - rollout.prompt_length}"
        )
        yield Violation("data.max_response_length", rollout.response_length, expected)
    if isinstance(shared.actor, FSDPActorConfig):
        ulysses = shared.actor.ulysses_sequence_parallel_size
        yield from head_rules(hf_config, f"{ACTOR}.ulysses_sequence_parallel_size", ulysses, "Ulysses ranks")
    yield from sglang_rules("actor_rollout_ref.rollout.name", rollout.name, hf_config, run.trainer.device)
    if rollout.workers_per_engine > 1:
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield from head_rules(hf_config, key, rollout.tensor_model_parallel_size, "tensor-parallel ranks")


def noise_notice(run: RunConfig) -> str | None:
    """Return a notice if the policy trains with dropout or other noise that its old log-probabilities lack; else None.

    A field that the model does not read is named, too.
    """
    model = run.actor_rollout_ref.model
    drawn = drawn_in_training(overridden(read_config_json(model.path), model.override_config))
    if not drawn:
        return None
    return (
        f"updates of the policy draw {', '.join(drawn)}, as config.json says, and old log-probabilities are computed "
        f"without: the ratio of a first update is not 1. Set rates to 0.0 in {POLICY}.override_config if you do not "
        "want that (docs/architecture.md, Reproducibility)"
    )


def rope_notice(run: RunConfig) -> str | None:
    """Return a notice if RoPE (dynamic, longrope) has other frequencies in sampling than in scoring; None otherwise."""
    shared = run.actor_rollout_ref
    if shared.rollout.name != "hf":
        return None
    fields = overridden(read_config_json(shared.model.path), shared.model.override_config)
    text = mapping_at(fields, "text_config") or fields
    rope = mapping_at(text, "rope_scaling") or mapping_at(text, "rope_parameters")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in LENGTH_ROPES:
        return None
    positions = rope.get("original_max_position_embeddings") or text.get("max_position_embeddings")
    positions = text.get("original_max_position_embeddings") or positions
    if not isinstance(positions, int) or shared.rollout.prompt_length + shared.rollout.response_length <= positions:
        return None
    return (
        f"RoPE scaling of type {kind}: rollout.name=hf samples a token by the length of its row so far, and the actor "
        f"scores it by the length of the whole row, so their log-probabilities differ in rows of more than {positions} "
        "tokens: vllm and sglang choose once for the run, and the actor with them"
    )


def sglang_rules(key: str, name: str, hf_config: Mapping[str, Json], device: str | None) -> Iterator[Violation]:
    """Yield a family that SGLang does not run, if it is the engine that a key names."""
    lacks_kernels = device == "cpu" and not has_sglang_kernels()
    problem = sglang_problem(hf_config.get("model_type"), "vision_config" in hf_config, lacks_kernels)
    if name == "sglang" and problem:
        yield Violation(key, name, problem)


# ---- options of the model that exclude others


def option_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield options of the policy that another option disables, or that this device cannot run."""
    shared = run.actor_rollout_ref
    actor = shared.actor
    model = shared.model
    device = run.trainer.device
    for name in ("use_remove_padding", "use_fused_kernels"):
        if name in actor and actor[name] != model[name]:
            yield Violation(f"{ACTOR}.{name}", actor[name], f"follows {POLICY}.{name}: set that one")
    if actor.use_prefix_grouper and not model.use_prefix_sharing:
        yield Violation(f"{ACTOR}.use_prefix_grouper", True, f"follows {POLICY}.use_prefix_sharing: set that key")
    if actor.uses_full_kl and actor.strategy == "megatron":
        expected = "needs the whole vocabulary in one worker, which only fsdp has: write low_var_kl, or strategy=fsdp"
        yield Violation(f"{ACTOR}.kl_loss_type", FULL_KL, expected)
    yield from fused_rules(model, POLICY, device)
    if model.use_fused_kernels and actor.uses_full_kl:
        expected = "needs logits, which a fused head does not make: write low_var_kl, or use_fused_kernels=false"
        yield Violation(f"{ACTOR}.kl_loss_type", FULL_KL, expected)
    if shared.ref.model_path is not None and model.lora_rank:
        expected = "must be null with lora_rank above 0: the reference policy is the actor without its adapters"
        yield Violation("actor_rollout_ref.ref.model.path", shared.ref.model_path, expected)
    if model.use_liger:
        key = f"{POLICY}.use_liger"
        if device == "cpu":
            yield Violation(key, True, "needs a GPU: write false with trainer.device=cpu")
        elif importlib.util.find_spec("liger_kernel") is None:
            expected = "needs the package liger-kernel, which is not installed: install it or write false"
            yield Violation(key, True, expected)


def fused_rules(model: HFModelConfig, key: str, device: str) -> Iterator[Violation]:
    """Yield a fused head whose backend cannot run on these workers, or that has adapters; ``key`` is the model's."""
    if not model.use_fused_kernels:
        return
    backend_key = f"{key}.fused_kernel_options.impl_backend"
    if model.fused_kernel_options.get("impl_backend") == "triton":
        if device in ("cpu", "npu"):
            yield Violation(backend_key, "triton", f"needs CUDA: write torch with trainer.device={device}")
        elif importlib.util.find_spec("triton") is None:
            expected = "needs the package triton, which is not installed: install it or write torch"
            yield Violation(backend_key, "triton", expected)
    if model.lora_rank and isinstance(model.target_modules, list) and "lm_head" in model.target_modules:
        expected = "must not name the head with use_fused_kernels=true: remove lm_head, or set use_fused_kernels=false"
        yield Violation(f"{key}.target_modules", model.target_modules, expected)


def tied_adapter_rules(model: HFModelConfig, key: str, hf_config: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield an adapter on the embedding or the head of a model with tied weights, which the engine would refuse."""
    targets = [model.target_modules] if isinstance(model.target_modules, str) else model.target_modules or ()
    named = [name for name in targets if name in ("embed_tokens", "lm_head")]
    fields = overridden(hf_config, model.override_config)
    tied = fields.get("tie_word_embeddings", mapping_at(fields, "text_config").get("tie_word_embeddings"))
    if model.lora_rank and named and tied:
        expected = (
            f"must not name {' and '.join(named)}: embedding and head of the model are one tensor "
            "(tie_word_embeddings), and an adapter would change one of them only"
        )
        yield Violation(f"{key}.target_modules", model.target_modules, expected)
