"""Vision-language models from rows with images to updated weights: two workers, vLLM, and proof that they look."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoConfig

from tests import metrics_page, remote_code

from . import shapes
from .always_calls import SIDE
from .conftest import PYTHON, REPOSITORY, Run, Workspace, call
from .features import GAP
from .test_learning import mean
from .verification import record

LAYOUT = "actor_rollout_ref.actor.megatron"
MEGATRON = {"--config-name": "ppo_megatron_trainer"}
MEGATRON_TP = MEGATRON | {f"{LAYOUT}.tensor_model_parallel_size": 2}
SGLANG = {"actor_rollout_ref.rollout.name": "sglang"}
ENGINES: dict[str, dict[str, object]] = {
    "fsdp": {},
    "sglang": SGLANG,
    "megatron tp": MEGATRON_TP,
    "megatron tp, sglang": MEGATRON_TP | SGLANG,
    "megatron pp": MEGATRON
    | {f"{LAYOUT}.pipeline_model_parallel_size": 2, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2},
}
FULL = [
    pytest.param(kind, engine, marks=pytest.mark.full)
    for kind, engine in (
        ("qwen2_vl", "fsdp"),
        ("qwen3_vl", "fsdp"),
        ("qwen3_vl_moe", "fsdp"),
        ("glm4v", "fsdp"),
        ("qwen2_5_vl", "sglang"),
        ("qwen2_5_vl", "megatron tp"),
        ("qwen2_5_vl", "megatron pp"),
        ("qwen2_5_vl", "megatron tp, sglang"),
        ("qwen3_vl_moe", "megatron tp"),
    )
]
LETTERS = {  # a reward that a random model earns some of
    "custom_reward_function.path": REPOSITORY / "tests/special_e2e/rewards.py",
    "custom_reward_function.name": "compute_score",
    "data.max_response_length": 16,
}
WORKERS = 2
SEES, GUESSES = ("val-core/shapes/reward/mean@1", "val-core/shuffled_shapes/reward/mean@1")
SUPERVISED_STEPS, STEPS = 30, 60


def overrides(data: Path, model: Path | str, steps: int, prompts: int = 16, samples: int = 8) -> dict[str, object]:
    """Return what differs from a run with text."""
    return {
        "data.train_files": data / "train.parquet",
        "data.val_files": f"[{data}/test.parquet,{data}/shuffled.parquet]",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 32,
        "data.max_response_length": 4,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.rollout.n": samples,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.limit_images": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
        "custom_reward_function.path": REPOSITORY / "tests/special_e2e/shapes.py",
        "custom_reward_function.name": "score",
        "trainer.n_gpus_per_node": WORKERS,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        "trainer.val_before_train": True,
    }


def tiny(folder: Path, kind: str, hidden_size: int = 64) -> str:
    from examples.tiny_model import make_tiny_vl_model

    return make_tiny_vl_model(str(folder / kind), kind, hidden_size=hidden_size, num_layers=2)


def judge(policy: str, folder: Path) -> Path:
    """Write a reward model that sees, with the tower of a policy."""
    from verl.utils.model import get_value_model_class

    config = AutoConfig.from_pretrained(policy, num_labels=1)
    torch.manual_seed(0)
    model = get_value_model_class(config).from_pretrained(policy, config=config)
    model.score.weight.data.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return folder


def named(engine: str) -> str:
    """Return the part of a folder's name that names an engine."""
    return engine.replace(",", "").replace(" ", "_")


@pytest.mark.parametrize(("kind", "engine"), [("qwen2_5_vl", "fsdp"), *FULL])
def test_images_reach_training_and_generation_alike(
    workspace: Workspace, tmp_path: Path, kind: str, engine: str
) -> None:
    """The engine's log-probabilities are the trainer's after updates of the tower, too; an image travels once."""
    on_megatron = engine.startswith("megatron")
    if on_megatron:
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    if "sglang" in engine:
        pytest.importorskip("sglang")
    shapes.write(tmp_path, train=32, test=4, supervised=4)
    model = tiny(tmp_path, kind, 128 if on_megatron else 64)  # with two key and value heads
    chosen = overrides(tmp_path, model, 2) | LETTERS | ENGINES[engine]
    run = workspace.train(f"vision_{kind}_{named(engine)}", chosen)
    side = 64 if kind.startswith("qwen3_vl") else shapes.SIZE  # a multiple of two patches of 16 or 14
    pixels, grid = side**2 * 3, 3 * 8
    put = 16 * (pixels + 4 * 2 * pixels + grid)  # as bytes, and as fp32 of two frames
    for step in (1, 2):
        numbers = run.steps[step]
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["multi_modal/bytes_put"] == put
        assert numbers[GAP] < 1e-4
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1
        assert all(map(math.isfinite, numbers.values()))
    assert put <= run.steps[2]["multi_modal/bytes_fetched"] <= WORKERS * put


LOOKS = [
    {"class_name": "verl.tools.image_zoom_in_tool.ImageZoomInTool", "config": {"type": "native", "num_workers": 2}},
    {
        "class_name": "tests.special_e2e.always_calls.Film",
        "config": {"type": "native"},
        "tool_schema": {"type": "function", "function": {"name": "film", "description": "Shows a film."}},
    },
]
TENSOR_PARALLEL = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}
TWO_SERVERS = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 2,
    "ray_kwargs.ray_init.num_cpus": 4,
}
SERVED = {"actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.agent.num_workers": 1}
LAYOUTS = ENGINES | {
    "tensor parallel": TENSOR_PARALLEL,
    "two servers": TWO_SERVERS,
    "two servers, sglang": TWO_SERVERS | SGLANG,
}
LOOKING = [
    ("qwen2_5_vl", "fsdp", 1),
    ("qwen2_5_vl", "sglang", 2),
    ("qwen2_5_vl", "two servers", 1),
    ("qwen2_5_vl", "two servers, sglang", 2),
    ("qwen2_5_vl", "megatron tp, sglang", 2),
    ("qwen2_5_vl", "tensor parallel", 2),
    ("qwen2_5_vl", "megatron tp", 2),
    ("qwen2_5_vl", "megatron pp", 1),
    ("qwen3_vl", "fsdp", 2),
    ("glm4v", "fsdp", 2),
    ("qwen3_vl", "two servers", 2),
    ("qwen3_vl_moe", "megatron tp", 1),
]


@pytest.mark.full  # experimental/agent_loop/test_later_images.py and workers/engine/test_vision_contract.py
@pytest.mark.parametrize(("kind", "engine", "tools"), LOOKING)
def test_images_and_films_of_tools_are_trained(
    workspace: Workspace, tmp_path: Path, kind: str, engine: str, tools: int
) -> None:
    """The log-probabilities of engine and trainer agree over whole trajectories with images, and films, in later turns.

    Args: ``tools`` is how many of ``LOOKS`` the model has.
    """
    if "megatron" in engine:
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    if "sglang" in engine:
        pytest.importorskip("sglang")
    (tmp_path / "tools.yaml").write_text(yaml.dump({"tools": LOOKS[:tools]}))
    shapes.write(tmp_path, train=16, test=4, supervised=4, side=SIDE)
    chosen = (
        overrides(tmp_path, tiny(tmp_path, kind, 128), 2, prompts=4, samples=4) | LETTERS | LAYOUTS[engine] | SERVED
    )
    turns = {"enable": True, "format": "always_looks", "tool_config_path": tmp_path / "tools.yaml"}
    turns |= {"max_assistant_turns": 4, "max_parallel_calls": 2}
    chosen |= {f"actor_rollout_ref.rollout.multi_turn.{name}": value for name, value in turns.items()}
    chosen |= {
        "actor_rollout_ref.model.external_lib": "tests.special_e2e.always_calls",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "whole_turns",
        "actor_rollout_ref.rollout.limit_images": 5,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024,
        "data.max_response_length": 512,
        "data.return_multi_modal_inputs": False,
        "trainer.rollout_data_dir": tmp_path / "dumps",
        "trainer.val_before_train": False,
    }
    run = workspace.train(f"looks_{kind}_{named(engine)}", chosen)
    seen: set[str] = set()
    for step in (1, 2):
        numbers = run.steps[step]
        assert numbers[GAP] < 1e-4 and numbers["training/rollout_log_prob_diff_mean"] < 1e-5
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1
        rows = [json.loads(line) for line in (tmp_path / "dumps" / f"{step}.jsonl").read_text().splitlines()]
        seen |= {call["name"] for row in rows for turn in row["turns"] for call in turn.get("calls", [])}
        assert numbers["tool_calls/count"] > 8 and numbers["num_turns/max"] > 5
    assert len(seen) == tools


@pytest.mark.full
def test_a_family_with_remote_code(workspace: Workspace, tmp_path: Path) -> None:
    """Kimi-VL by the stand-in of ``tests/remote_code``, trained packed, against vLLM's code of the family.

    The checkpoint is a model that its code loads, with the weights of training.
    """
    shapes.write(tmp_path, train=32, test=4, supervised=4)
    # The sizes of a latent that vLLM's CPU kernel has.
    model = remote_code.write_model(tmp_path / "kimi_vl", "kimi_vl", kv_lora_rank=512, qk_rope_head_dim=64)
    changes = overrides(tmp_path, model, 2) | LETTERS
    changes |= {
        "actor_rollout_ref.model.trust_remote_code": True,
        "data.trust_remote_code": True,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents": "[model]",
        "trainer.save_freq": 2,
    }
    run = workspace.train("vision_kimi_vl", changes, timeout_s=1500)
    pixels, grid = shapes.SIZE**2 * 3, 2 * 8
    for step in (1, 2):
        numbers = run.steps[step]
        assert numbers["multi_modal/bytes_put"] == 16 * (pixels + 4 * pixels + grid)
        assert numbers[GAP] < 1e-4
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1
        assert all(map(math.isfinite, numbers.values()))
    saved = run.folder / "global_step_2" / "actor" / "huggingface"
    before, after = remote_code.load(model).state_dict(), remote_code.load(saved).state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.full
def test_mixed_rows_are_trained_on_validated_dumped_and_resumed(workspace: Workspace, tmp_path: Path) -> None:
    """Text, images and videos of other columns in one batch, in all roles, generated by one engine over both workers.

    A run that goes on from a checkpoint is the same run.
    """
    for name, count in (("train", 16), ("test", 5)):
        pq.write_table(pa.Table.from_pylist(shapes.mixed(count, seed=count)), tmp_path / f"{name}.parquet")
    policy = tiny(tmp_path, "qwen2_5_vl", 128)
    base = overrides(tmp_path, policy, 2, prompts=8, samples=4) | LETTERS
    base |= {
        "data.val_files": tmp_path / "test.parquet",
        "data.image_key": "pictures",
        "data.video_key": "clips",
        "data.max_prompt_length": 64,
        "actor_rollout_ref.rollout.limit_images": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 512,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": WORKERS,
        "algorithm.adv_estimator": "gae",
        "critic.model.path": policy,
        "critic.model.use_remove_padding": True,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "critic.optim.lr": 1e-3,
        "reward_model.enable": True,
        "reward_model.model.path": judge(policy, tmp_path / "judge"),
        "reward_model.model.input_tokenizer": None,
        "reward_model.model.use_remove_padding": True,
        "reward_model.micro_batch_size_per_gpu": 8,
        "trainer.save_freq": 1,
    }
    folders = {name: tmp_path / name for name in ("rollouts", "validation")}
    dumps = {"trainer.rollout_data_dir": folders["rollouts"], "trainer.validation_data_dir": folders["validation"]}
    whole = workspace.train("vision_mixed", base | dumps)
    rest = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": whole.folder / "global_step_1"}
    resumed = workspace.train("vision_resumed", base | rest)
    for step in (1, 2):
        assert whole.steps[step][GAP] < 1e-4
        assert whole.steps[step]["actor/grad_norm"] > 0 and whole.steps[step]["critic/grad_norm"] > 0
        lines = (folders["rollouts"] / f"{step}.jsonl").read_text().splitlines()
        asked, scores = zip(*((row["input"], row["score"]) for row in map(json.loads, lines)), strict=True)
        assert len(set(scores)) > 16
        assert len(asked) == 8 * 4 and any("or" in text for text in asked) and any("say" in text for text in asked)
    assert len((folders["validation"] / "2.jsonl").read_text().splitlines()) == 5
    fetched = "multi_modal/bytes_fetched"  # depends on what a process has seen before
    expected, found = ({k: v for k, v in run.numbers(2).items() if k != fetched} for run in (whole, resumed))
    assert found == expected


@pytest.mark.full
def test_it_learns_to_look(workspace: Workspace, verification_page: Path | None, tmp_path: Path) -> None:
    """After a supervised warm-up the rewards rise, and are those of guessing where rows have the images of others."""
    shapes.write(tmp_path)
    warm_up = {
        "data.train_files": tmp_path / "sft.parquet",
        "data.train_batch_size": 32,
        "data.max_token_len_per_gpu": 2048,
        "data.max_length": 64,
        "model.path": tiny(tmp_path, "qwen2_5_vl"),
        "model.use_remove_padding": True,
        "model.enable_gradient_checkpointing": False,
        "engine.model_dtype": "fp32",
        "optim.lr": 2e-3,
        "optim.lr_warmup_steps_ratio": 0.05,
        "checkpoint.save_contents": "[hf_model]",
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": SUPERVISED_STEPS,
        "trainer.save_freq": SUPERVISED_STEPS,
        "trainer.default_local_dir": tmp_path / "sft",
    }
    call([*PYTHON, "verl.trainer.sft_trainer", *(f"{key}={value}" for key, value in warm_up.items())])
    model = tmp_path / "sft" / f"global_step_{SUPERVISED_STEPS}" / "huggingface"
    learning = overrides(tmp_path, model, STEPS, prompts=32, samples=16)
    run: Run = workspace.train("vision_learning", learning, timeout_s=880)
    first, last = run.steps[0], run.steps[STEPS]
    gap = max(run.steps[step][GAP] for step in range(1, STEPS + 1))
    rewards = [mean(run, "critic/score/mean", steps) for steps in (range(1, 6), range(STEPS - 4, STEPS + 1))]
    figures = [*rewards, first[SEES], last[SEES], last[GUESSES]]
    row = ["Qwen2.5-VL, two workers", str(STEPS), *(f"{figure:.2f}" for figure in figures), f"{gap:.1e}"]
    record(verification_page, "## Learning to look", row)
    assert rewards[1] > rewards[0] + 0.15
    assert last[SEES] > last[GUESSES] + 0.2 and last[GUESSES] < 0.35
    assert gap < 1e-4
