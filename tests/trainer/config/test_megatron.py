"""``ppo_megatron_trainer``: its composition, and the layouts that are refused before anything starts."""

import itertools
import json

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from verl.base_config import ConfigError, build_node
from verl.trainer.config.rules import megatron as rules
from verl.trainer.config.rules.megatron import ARCHITECTURES, stage_problem
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import validate_config
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import McoreActorConfig, McoreCriticConfig, McoreEngineConfig, RewardModelConfig

LAYOUT, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
TP, PP, CP, EP = (
    f"{LAYOUT}.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model")
)
OVERRIDES = f"{LAYOUT}.override_transformer_config"
DDP = f"{LAYOUT}.override_ddp_config"
OPTIM = "actor_rollout_ref.actor.optim.override_optimizer_config"
REWARD = "with a reward model"
MODEL_SHARES = "actor_rollout_ref.model.use_prefix_sharing"
SHARING = f"{MODEL_SHARES}=true"


@pytest.fixture(scope="module")
def base(composed):
    return composed(name="ppo_megatron_trainer")


@pytest.fixture(scope="module")
def megatron(base):
    """Set keys of one composed tree, which takes a hundredth of the time of composing it again."""

    def make(*overrides):
        config = base.copy()
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        return config

    return make


@pytest.fixture(scope="module")
def reward(small_run):
    """Return the overrides of a run with a reward model."""
    (model,) = [each for each in small_run if each.startswith("actor_rollout_ref.model.path=")]
    return [
        "reward_model.enable=true",
        "reward_model.micro_batch_size_per_gpu=2",
        "data.return_raw_chat=true",
        f"reward_model.model.path={model.split('=')[1]}",
    ]


def violations(config):
    try:
        validate_config(config, use_reference_policy=True, use_critic=True)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def spelled(overrides, reward):
    return [each for item in overrides for each in (reward if item == REWARD else [item])]


def test_composition(megatron):
    config = megatron(f"{TP}=2", "actor_rollout_ref.actor.megatron.seed=7", f"+{OVERRIDES}.moe_router_dtype=fp64")
    actor, critic = (omega_conf_to_dataclass(node) for node in (config.actor_rollout_ref.actor, config.critic))
    assert isinstance(actor, McoreActorConfig) and isinstance(critic, McoreCriticConfig)
    assert actor.engine is actor.megatron and actor.optim.lr == 1e-6 and critic.optim.lr == 1e-5
    for node in (config.actor_rollout_ref.ref, config.critic, config.reward_model):
        assert node.strategy == "megatron" and node.megatron.tensor_model_parallel_size == 2
    reference, reward = (
        omega_conf_to_dataclass(config.actor_rollout_ref.ref.megatron),
        build_node(config.reward_model, RewardModelConfig),
    )
    assert isinstance(reference, McoreEngineConfig) and reference.seed == 7
    assert reference.override_transformer_config["moe_router_dtype"] == "fp64"
    assert isinstance(reward.engine, McoreEngineConfig) and reward.engine.tensor_model_parallel_size == 2
    assert "fsdp_config" not in config.actor_rollout_ref.actor and "fsdp_config" not in config.critic.model
    assert critic.model.as_model_config().enable_gradient_checkpointing is True
    assert violations(config) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{TP}=2", f"{LAYOUT}.sequence_parallel=false"],
        [f"{PP}=2", "actor_rollout_ref.actor.use_dynamic_bsz=true"],
        [f"{CP}=2", REWARD],
        [f"{TP}=2", "actor_rollout_ref.model.use_fused_kernels=true", REWARD],
        ["trainer.n_gpus_per_node=4", f"{TP}=2", f"{PP}=2", f"{LAYOUT}.virtual_pipeline_model_parallel_size=2"],
        # A batch for one data-parallel shard and two generation groups of two.
        ["trainer.n_gpus_per_node=4", f"{TP}=2", f"{PP}=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        # Workers of its own, and a layout of its own.
        [REWARD, f"{TP}=2", "reward_model.enable_resource_pool=true", "reward_model.n_gpus_per_node=1",
         "reward_model.nnodes=1", "reward_model.megatron.tensor_model_parallel_size=1"],
        [f"+{DDP}.overlap_param_gather=true", f"+{DDP}.overlap_grad_reduce=true"],
    ],
)  # fmt: skip
def test_layouts_that_run(megatron, reward, overrides):
    assert violations(megatron(*spelled(overrides, reward))) == {}


def test_megatron_without_transformer_engine_is_told_once_on_a_gpu(megatron, composed, monkeypatch, caplog):
    """Unless the configuration chooses the layers; the variable for Megatron goes with the same roles."""
    engines = rules.megatron_engines(RunConfig.parse(megatron("trainer.device=cuda")))
    assert engines and not rules.megatron_engines(RunConfig.parse(composed()))
    choices = [f"+{node}.override_transformer_config.transformer_impl=local" for node in (LAYOUT, CRITIC)]
    chosen = rules.megatron_engines(RunConfig.parse(megatron(*choices)))
    rules.tell_slow_layers("cpu", engines)
    rules.tell_slow_layers("cuda", chosen)
    rules.tell_slow_layers("cuda", [])
    assert not caplog.records
    rules.tell_slow_layers("cuda", engines)
    (line,) = caplog.messages
    assert "Transformer Engine is not installed" in line and "docs/install.md" in line
    monkeypatch.setattr(rules, "default_implementation", lambda device: "transformer_engine")
    rules.tell_slow_layers("cuda", engines)
    assert len(caplog.records) == 1


def test_what_established_commands_add_without_effect_is_accepted_and_named(megatron, caplog):
    assert violations(megatron(f"{LAYOUT}.use_mbridge=true", f"{LAYOUT}.dist_checkpointing_path=/no/such")) == {}
    assert f"{LAYOUT}.dist_checkpointing_path=/no/such ({LAYOUT}.use_dist_checkpointing=false)" in caplog.text
    assert f"{LAYOUT}.use_mbridge, actor_rollout_ref.ref.megatron.use_mbridge" in caplog.text
    assert "mbridge builds models that verl.models.mcore has no table for" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ([f"{TP}=4"], TP, "must divide the 2 workers"),
        (["trainer.n_gpus_per_node=4", f"{TP}=2", f"{PP}=2", f"{CP}=2"], TP, "must divide the 4 workers"),
        (["trainer.n_gpus_per_node=3", f"{TP}=3", "data.train_batch_size=24"], TP, "must divide num_attention_heads=4"),
        (["trainer.n_gpus_per_node=4", f"{TP}=4"], TP, "must divide num_key_value_heads=2"),
        ([f"{PP}=2", f"{LAYOUT}.virtual_pipeline_model_parallel_size=3"], PP, "must divide the 4 layers"),
        ([f"{LAYOUT}.virtual_pipeline_model_parallel_size=2"],
         f"{LAYOUT}.virtual_pipeline_model_parallel_size", "needs pipeline_model_parallel_size of 2 or more"),
        ([f"{PP}=2", f"{LAYOUT}.virtual_pipeline_model_parallel_size=2", f"+{OVERRIDES}.batch_p2p_comm=true"],
         f"{OVERRIDES}.batch_p2p_comm", "the wrong activations, silently"),
        ([f"{EP}=2"], EP, "must divide the 0 experts"),
        ([f"{PP}=2", f"{EP}=2"], EP, "must divide the 1 workers that hold the same layers"),
        (["trainer.n_gpus_per_node=4", f"{TP}=2", f"{EP}=4", f"{LAYOUT}.expert_tensor_parallel_size=null"],
         EP, "x expert_tensor_parallel_size=2 must divide the 4"),
        (["trainer.n_gpus_per_node=4", f"{TP}=2", f"{EP}=2", f"{LAYOUT}.expert_tensor_parallel_size=2"],
         f"{LAYOUT}.expert_tensor_parallel_size", "must be 1 with expert_model_parallel_size=2 on CPU workers"),
        ([f"{TP}=2", f"{LAYOUT}.expert_tensor_parallel_size=3"],
         f"{LAYOUT}.expert_tensor_parallel_size", "must be null, 1 or tensor_model_parallel_size=2"),
        ([f"{TP}=0"], TP, "must be an integer of 1 or more"),
        ([f"{TP}=2", f"{CRITIC}.tensor_model_parallel_size=1"],
         f"{CRITIC}.tensor_model_parallel_size", "must be 2, as in actor_rollout_ref.actor.megatron"),
        ([REWARD, f"{TP}=2", "reward_model.megatron.tensor_model_parallel_size=1"],
         "reward_model.megatron.tensor_model_parallel_size", "must be 2, as in"),
        ([f"{PP}=2", f"+{OVERRIDES}.num_layers_in_first_pipeline_stage=4"],
         f"{OVERRIDES}.num_layers_in_first_pipeline_stage", "the other 1 stages share evenly, 0 are left"),
        ([f"+{OVERRIDES}.num_layers_in_last_pipeline_stage=1"],
         f"{OVERRIDES}.num_layers_in_last_pipeline_stage", "needs pipeline_model_parallel_size of 2"),
        ([f"{PP}=2", f"+{OVERRIDES}.account_for_loss_in_pipeline_split=true"], PP, "5 with embedding and loss counted"),
        ([f"+{OVERRIDES}.recompute_granularty=full"], f"{OVERRIDES}.recompute_granularty", "recompute_granularity?"),
        ([f"{OVERRIDES}.recompute_granularity=some"], f"{OVERRIDES}.recompute_granularity", "full, selective"),
        ([f"{OVERRIDES}.recompute_modules=[core_att]"], f"{OVERRIDES}.recompute_modules", "names core_att: it may"),
        ([f"+{OVERRIDES}.moe_router_dtype=bf16"], f"{OVERRIDES}.moe_router_dtype", "one of fp32, fp64"),
        ([f"{PP}=2", f"{LAYOUT}.virtual_pipeline_model_parallel_size=2", f"+{OVERRIDES}.overlap_p2p_comm=false"],
         f"{OVERRIDES}.overlap_p2p_comm", "must be true with virtual stages"),
        ([f"{LAYOUT}.use_dist_checkpointing=true", f"{LAYOUT}.dist_checkpointing_path=/no/such"],
         f"{LAYOUT}.dist_checkpointing_path", "no such folder: write one that"),
        ([f"{OVERRIDES}.attention_backend=fast"], f"{OVERRIDES}.attention_backend", "one of flash"),
        ([f"+{OVERRIDES}.tensor_model_parallel_size=2"], f"{OVERRIDES}.tensor_model_parallel_size", f"write {TP}"),
        ([f"+{OVERRIDES}.num_layers=2"], f"{OVERRIDES}.num_layers", "actor_rollout_ref.model.override_config"),
        ([f"+{OVERRIDES}.bf16=true"], f"{OVERRIDES}.bf16", "set by the engine"),
        ([f"+{OVERRIDES}.mamba_num_heads=2"], f"{OVERRIDES}.mamba_num_heads", "belongs to the model"),
        ([f"+{OVERRIDES}.moe_aux_loss_coeff=0.01"], f"{OVERRIDES}.moe_aux_loss_coeff", "is for pretraining"),
        ([f"+{OVERRIDES}.cross_entropy_loss_fusion=true"], f"{OVERRIDES}.cross_entropy_loss_fusion", "has no effect"),
        ([f"+{DDP}.use_megatron_fsdp=true"], f"{DDP}.use_megatron_fsdp", "read by Megatron-FSDP"),
        ([f"+{DDP}.average_in_collective=true"], f"{DDP}.average_in_collective", "gradients must be summed"),
        ([f"+{DDP}.num_distributed_optimizer_instances=2"], f"{DDP}.num_distributed_optimizer_instances", "must be 1"),
        ([f"+{DDP}.align_param_gather=true"], f"{DDP}.align_param_gather", "not supported"),
        ([f"+{OPTIM}.clip_grad=0.5"], f"{OPTIM}.clip_grad", "write actor_rollout_ref.actor.optim.clip_grad"),
        ([f"+{OPTIM}.adam_beta2=0.5"], f"{OPTIM}.adam_beta2", "write actor_rollout_ref.actor.optim.betas"),
        ([f"+{OPTIM}.loss_scale=8"], f"{OPTIM}.loss_scale", "set by the engine"),
        ([f"+{OPTIM}.sgd_momentum=0.5"], f"{OPTIM}.sgd_momentum", "has no effect"),
        ([f"+{OPTIM}.decoupled_lr=0.5"], f"{OPTIM}.decoupled_lr", "one learning rate"),
        ([f"+{OPTIM}.overlap_param_gather=true"], f"{OPTIM}.overlap_param_gather", "must be false"),
        ([f"+{OPTIM}.use_distributed_optimizer=false"], f"{OPTIM}.use_distributed_optimizer", "belongs to the layout"),
        ([f"+{DDP}.bucket_sise=1"], f"{DDP}.bucket_sise", "bucket_size?"),
        ([f"+{DDP}.overlap_param_gather=true"], f"{DDP}.overlap_param_gather", "needs overlap_grad_reduce=true"),
        ([f"+{DDP}.overlap_param_gather=true", f"+{DDP}.overlap_grad_reduce=true",
          f"{LAYOUT}.use_distributed_optimizer=false"],
         f"{DDP}.overlap_param_gather", "needs megatron.use_distributed_optimizer=true"),
        ([f"+{DDP}.use_distributed_optimizer=false"],
         f"{DDP}.use_distributed_optimizer", "one level up"),
        (["+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=true"],
         "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload", "needs CUDA"),
        (["+actor_rollout_ref.actor.optim.override_optimizer_config.adam_epsilon=1"],
         "actor_rollout_ref.actor.optim.override_optimizer_config.adam_epsilon", "adam_eps?"),
        (["actor_rollout_ref.model.use_fused_kernels=true", f"+{OVERRIDES}.defer_embedding_wgrad_compute=true"],
         f"{OVERRIDES}.defer_embedding_wgrad_compute", "actor_rollout_ref.model.use_fused_kernels=false"),
        (["actor_rollout_ref.model.use_fused_kernels=true",
          "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton"],
         "actor_rollout_ref.model.fused_kernel_options.impl_backend", "needs CUDA"),
        ([f"+{OVERRIDES}.moe_token_dispatcher_type=allgather"],
         f"{OVERRIDES}.moe_token_dispatcher_type", "must be alltoall, because"),
        ([SHARING, f"{CP}=2"], MODEL_SHARES, "is not supported with megatron.context_parallel_size=2"),
        ([SHARING, f"{LAYOUT}.use_mbridge=true"], MODEL_SHARES, "is not supported with megatron.use_mbridge=true"),
        ([SHARING, "+actor_rollout_ref.model.override_config.model_config.attention_dropout=0.1"],
         MODEL_SHARES, "needs attention_dropout=0.0"),
        ([SHARING, f"+{OVERRIDES}.transformer_impl=transformer_engine"], MODEL_SHARES, "transformer_impl=local"),
        ([SHARING, f"+{OVERRIDES}.attention_dropout=0.1"], MODEL_SHARES, "attention_dropout to be left out, it is 0.1"),
        (["critic.model.use_prefix_sharing=true", f"{CP}=2"], "critic.model.use_prefix_sharing", "context_parallel"),
        ([f"+{OVERRIDES}.apply_rope_fusion=true"], f"{OVERRIDES}.apply_rope_fusion", "needs CUDA"),
        ([f"+{OVERRIDES}.transformer_impl=transformer_engine"], f"{OVERRIDES}.transformer_impl", "write local"),
        (["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full"],
         "actor_rollout_ref.actor.kl_loss_type", "write low_var_kl"),
        (["+actor_rollout_ref.actor.checkpoint.async_saved=true"],
         "actor_rollout_ref.actor.checkpoint.async_saved", "there is no such key"),
        ([f"+{LAYOUT}.tensor_parallel_size=2"], f"{LAYOUT}.tensor_parallel_size", "tensor_model_parallel_size"),
        (["actor_rollout_ref.actor.strategy=fsdp"], "actor_rollout_ref.actor.strategy", "must be megatron"),
        (["trainer.n_gpus_per_node=4", f"{PP}=2", "actor_rollout_ref.actor.ppo_mini_batch_size=7",
          "data.train_batch_size=7", "actor_rollout_ref.rollout.n=1"],
         "data.train_batch_size", "must be a multiple of 4 workers"),
    ],
)  # fmt: skip
def test_refused(megatron, reward, overrides, key, message):
    found = violations(megatron(*spelled(overrides, reward)))
    assert message in found.get(key, ""), found


def test_roles_of_one_process_have_one_engine(composed):
    found = violations(composed("critic=dp_critic", name="ppo_megatron_trainer"))
    assert "choose both by --config-name" in found["critic.strategy"], found


def test_the_fsdp_tree_names_the_other(composed):
    found = violations(composed("actor_rollout_ref.actor.strategy=megatron"))
    assert "ppo_megatron_trainer" in found["actor_rollout_ref.actor.strategy"], found


def test_architectures_are_those_of_the_engine():
    from verl.models.mcore import families

    assert sorted(ARCHITECTURES) == families.supported_architectures()


def test_architectures_that_it_cannot_hold(megatron, tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    found = violations(megatron(f"actor_rollout_ref.model.path={tmp_path}"))
    assert "Gemma2ForCausalLM is not supported with strategy=megatron" in found["actor_rollout_ref.model.path"]
    bridged = violations(megatron(f"actor_rollout_ref.model.path={tmp_path}", f"{LAYOUT}.use_mbridge=true"))
    message = bridged[f"{LAYOUT}.use_mbridge"]
    assert "architecture Gemma2ForCausalLM is built by mbridge, and this run lacks CUDA devices, mbridge" in message
    assert "actor_rollout_ref.model.path" not in bridged


MODEL = "actor_rollout_ref.model"


@pytest.fixture
def qwen3_moe(tmp_path):
    """Write the file of a model, and return overrides that name it."""

    def make(*overrides, folder="model", **changes):
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 4}
        content = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 4096}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(content | sizes | changes))
        (tmp_path / folder / "tokenizer.json").write_text('{"model": {}}')
        return [f"{MODEL}.path={tmp_path / folder}", *overrides]

    return make


YARN = {"type": "yarn", "factor": 4.0}
GELU = "hidden_act=gelu is not supported with strategy=megatron: it knows silu"


@pytest.mark.parametrize(
    ("changes", "overrides", "key", "message"),
    [
        ({"hidden_act": "gelu"}, [], "path", f"{GELU}; name another model, or write --config-name=ppo_trainer"),
        ({"hidden_act": "gelu", "rope_scaling": YARN}, [], "path", f"{GELU}; rope_scaling of type yarn is not"),
        ({}, [f"{MODEL}.override_config.hidden_act=gelu"], "override_config.hidden_act",
         "=gelu: is not supported with strategy=megatron: it knows silu; leave it out, or write --config-name"),
        ({"use_sliding_window": True}, [f"{MODEL}.override_config.model_config.use_sliding_window=false",
                                        f"{MODEL}.override_config.model_config.sliding_window=8"],
         "override_config", "names sliding_window, which needs use_sliding_window=true"),
        ({"use_sliding_window": False, "sliding_window": None},
         [f"{MODEL}.override_config.model_config.use_sliding_window=true"],
         "override_config.model_config.use_sliding_window", "=true: is not supported with strategy=megatron"),
        ({}, [f"{MODEL}.override_config.rope_parameters={{rope_type: dynamic, factor: 2.0}}"],
         "override_config.rope_parameters", "of type dynamic is not supported with strategy=megatron: it knows"),
    ],
)  # fmt: skip
def test_models_that_it_would_compute_differently(megatron, qwen3_moe, changes, overrides, key, message):
    found = violations(megatron(*qwen3_moe(*overrides, **changes)))
    assert message in found.pop(f"{MODEL}.{key}", "") and found == {}, found


def test_what_the_workers_may_take_is_not_refused(megatron, qwen3_moe, monkeypatch):
    """Fields that override a fault, code beside the model, and families of the user's."""
    wrong = qwen3_moe(hidden_act="gelu", auto_map={"AutoConfig": "configuration.Mine"})
    assert violations(megatron(*wrong, f"{MODEL}.override_config.hidden_act=silu")) == {}
    assert violations(megatron(*wrong, f"{MODEL}.trust_remote_code=true")) == {}
    other = qwen3_moe(folder="other", architectures=["MineForCausalLM"])
    assert 'architectures=["MineForCausalLM"]' in violations(megatron(*other))[f"{MODEL}.path"]
    for model in (wrong, other):
        assert violations(megatron(*model, f"{MODEL}.external_lib=json")) == {}
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "json")
    assert violations(megatron(*other)) == {}


def test_models_of_other_roles(megatron, qwen3_moe):
    """The reference may have its own, with the overrides of both; the configuration may come from another folder."""
    plain, gelu = (qwen3_moe(folder=act, hidden_act=act)[0].split("=")[1] for act in ("silu", "gelu"))
    reference = "actor_rollout_ref.ref.model"
    of_file = violations(megatron(f"{MODEL}.path={plain}", f"{reference}.path={gelu}", f"critic.model.path={gelu}"))
    assert set(of_file) == {f"{reference}.path", "critic.model.path"} and all(GELU in text for text in of_file.values())
    taken = violations(megatron(f"{MODEL}.path={plain}", f"{reference}.path={gelu}",
                                f"{reference}.override_config.hidden_act=silu"))  # fmt: skip
    assert taken == {}
    elsewhere = violations(megatron(f"{MODEL}.path={plain}", f"{MODEL}.hf_config_path={gelu}"))
    assert list(elsewhere) == [f"{MODEL}.hf_config_path"]
    assert violations(megatron(f"{MODEL}.path={gelu}", f"{MODEL}.hf_config_path={plain}")) == {}


def test_stages_are_cut_as_megatron_core_cuts_them():
    """Against the check of Megatron-Core itself, over every small split."""
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    first, last = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
    embedding = "account_for_embedding_in_pipeline_split"
    for layers, pp, stages in itertools.product((4, 5, 6, 8), (2, 3, 4), (1, 2)):
        for overrides in ({}, {first: 1}, {first: 2}, {last: 2}, {first: 2, last: 1}, {embedding: True}):
            if pp == 2 and len(overrides) == 2:
                continue  # it divides by zero
            try:
                TransformerConfig(
                    num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=pp,
                    virtual_pipeline_model_parallel_size=stages if stages > 1 else None, pipeline_dtype=torch.float32,
                    **overrides,
                )  # fmt: skip
                runs = True
            except (ValueError, AssertionError):
                runs = False
            runs = runs and (bool(overrides) or layers % (pp * stages) == 0)  # it looks at this later
            assert runs == (stage_problem(layers, pp, stages, overrides) is None), (layers, pp, stages, overrides)


def test_what_is_refused_exists():
    """Lists of fields have no effect once Megatron-Core spells one otherwise."""
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    fields = rules.mcore_fields(rules.TRANSFORMER)
    layout = {name for name in McoreEngineConfig() if "parallel" in name}
    assert len(layout) == 7
    listed = {*layout, *rules.OF_MODEL, *rules.OF_ENGINE}
    assert {*listed, *rules.OF_PRETRAINING, *rules.UNREAD} <= fields
    assert set(rules.OF_MEGATRON_FSDP) <= rules.mcore_fields(rules.DDP)
    of_optimizer = {
        *rules.OF_OPTIM,
        *rules.OPTIMIZER_OF_ENGINE,
        *rules.UNREAD_BY_ADAM,
    }
    assert of_optimizer <= rules.mcore_fields(rules.OPTIMIZER)


def test_vision_language_models_count_by_their_language_model(megatron, tmp_path):
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "hidden_act": "silu"}
    whole = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    paths = [f"{node}.path={tmp_path}" for node in ("actor_rollout_ref.model", "critic.model")]
    first = f"{LAYOUT}.override_transformer_config.num_layers_in_first_pipeline_stage"
    for tower, fits in (({}, True), ({"deepstack_visual_indexes": [0, 1, 2]}, False)):
        content = whole | {"text_config": text, "vision_config": tower}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert violations(megatron(*paths)) == {}
        found = violations(megatron(*paths, f"{PP}=2"))
        assert found == {} if fits else "gives the first stage 2 layers" in found[f"{LAYOUT}.{PP.split('.')[-1]}"]
        assert f"{LAYOUT}.{PP.split('.')[-1]}" not in violations(megatron(*paths, f"{PP}=2", f"+{first}=3"))
    cut = violations(megatron(*paths, f"{TP}=2", f"{LAYOUT}.sequence_parallel=false"))
    assert "sums the gradient of the vision tower" in cut[f"{LAYOUT}.sequence_parallel"]
    assert violations(megatron(*paths, f"{TP}=2")) == {}
    (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": ["Glm4vForConditionalGeneration"]}))
    assert "Qwen3VLForConditionalGeneration" in violations(megatron(*paths))["actor_rollout_ref.model.path"]


@pytest.mark.parametrize(
    ("layers", "pp", "stages", "overrides", "first"),
    [
        (8, 2, 1, {}, 4),
        (8, 2, 2, {}, 2),
        (8, 3, 1, {"num_layers_in_first_pipeline_stage": 2}, 2),
        (8, 3, 1, {"num_layers_in_last_pipeline_stage": 2}, 3),
        (7, 2, 1, {"account_for_embedding_in_pipeline_split": True}, 3),
        (6, 2, 1, {f"account_for_{each}_in_pipeline_split": True for each in ("embedding", "loss")}, 3),
        (8, 2, 1, {"pipeline_model_parallel_layout": "Et|t*7L"}, None),
    ],
)
def test_layers_of_the_first_stage(layers, pp, stages, overrides, first):
    assert rules.first_stage_layers(layers, pp, stages, overrides) == first


def test_experts_of_the_model_count(megatron, tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    paths = [f"{node}.path={tmp_path}" for node in ("actor_rollout_ref.model", "critic.model")]
    assert violations(megatron(*paths, f"{EP}=2")) == {}
    cut = violations(megatron(*paths, f"{TP}=2", f"{LAYOUT}.sequence_parallel=false"))
    assert "the model has experts" in cut[f"{LAYOUT}.sequence_parallel"]
    assert violations(megatron(*paths, f"{TP}=2")) == {}
    assert violations(megatron(*paths, f"{TP}=2", f"{EP}=2")) == {}
    four = violations(megatron(*paths, "trainer.n_gpus_per_node=4", f"{EP}=4"))
    assert "must divide the 6 experts" in four[EP]
