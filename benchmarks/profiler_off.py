"""Measure the cost of a disabled profiler against the same code without it, in turn.

A method of a worker is called with its annotation and without. With ``--model`` and ``--data``, the checkpoint and the
folder of the quick start, a real run follows in which every other step has no annotation and no mark in it, on the
driver and in the workers.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, register
from verl.single_controller.base.worker_group import registered_methods
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.observe.console import get_console
from verl.utils.profiler import DistProfiler, ProfilerConfig, marked_timer
from verl.utils.profiler import profile as profile_module
from verl.utils.profiler.profile import RoleProfilers
from verl.utils.profiler.ranges import captured_range, simple_timer

WARMUP_STEPS = 4
RESAMPLES = 1000
QUICK_START = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 16,
    "data.max_prompt_length": 16,
    "data.max_response_length": 32,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.optim.lr": 1e-9,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[]",
    "trainer.live_view": "off",
    "trainer.report": False,
    "trainer.total_epochs": 1000,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
}
"""The quick start's; the learning rate keeps the lengths, and with them the steps, as they are."""


# ---- a method, in this process


class Owner:
    """A worker with a method as its role has them, and the same method without the annotation."""

    def __init__(self, milliseconds: float) -> None:
        self.profiler = RoleProfilers({"actor": DistProfiler(0, ProfilerConfig(tool="torch"))})
        self.weight = torch.randn(256, 256)
        self.repeats = 0
        while milliseconds and _seconds(self.plain, 5) / 5 < milliseconds / 1e3:
            self.repeats += 1

    def plain(self) -> torch.Tensor:
        """Do the work."""
        result = self.weight
        for _ in range(self.repeats):
            result = self.weight @ self.weight
        return result

    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def annotated(self) -> torch.Tensor:
        """Do the same work, as a task with one mini-batch."""
        with captured_range("mini_batch 0"):
            result = self.plain()
        self.profiler.step()
        return result


def _seconds(call: Callable[[], Any], count: int) -> float:
    """Return the CPU seconds of some calls: a busy machine adds little to them."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return time.thread_time() - start


def measure_method(milliseconds: float, rounds: int, calls: int) -> str:
    """Return the figures of the two methods, called alternately."""
    owner = Owner(milliseconds)
    kinds = ("annotated", "plain", "again")
    methods = {"annotated": owner.annotated, "plain": owner.plain, "again": owner.plain}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    chance = random.Random(0)
    for _ in range(rounds):
        for kind in chance.sample(kinds, len(kinds)):
            times[kind].append(_seconds(methods[kind], calls) / calls)
    annotated, plain = (statistics.median(times[kind]) for kind in kinds[:2])
    return (
        f"a method of {plain * 1e6:.2f} us, {rounds} rounds of {calls} calls each: with the annotation "
        f"{(annotated - plain) * 1e6:+.2f} us, ratio {_median(times['annotated'], times['plain'])}; control (plain "
        f"against plain) {_median(times['again'], times['plain'])}"
    )


def _median(seconds: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios of pairs, with the interval that it has by drawing pairs again."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low = medians[int(0.025 * RESAMPLES)]
    high = medians[int(0.975 * RESAMPLES)]
    return f"{statistics.median(ratios):.4f} (95 % interval {low:.4f} to {high:.4f})"


# ---- steps of a run


def switched_worker(base: type) -> type:
    """Return a worker class whose tasks can be had with and without their annotation."""

    on_all_ranks = register(dispatch_mode=Dispatch.ONE_TO_ALL)  # here, since Ray copies a class without its globals

    class SwitchedWorker(base):  # type: ignore[misc]
        @on_all_ranks
        def annotate(self, on: bool) -> None:
            """Give all tasks their annotation, or take it away."""
            from verl.workers.roles import base as roles

            if not hasattr(self, "variants"):
                self.variants = {name: plain_variant(getattr(base, name)) for name in registered_methods(base)}
                self.own_profiler = self.profiler
            for name, plain in self.variants.items():
                if plain is not None:
                    setattr(type(self), name, getattr(base, name) if on else plain)
            roles.captured_range = captured_range if on else lambda name: _NOTHING
            self.profiler = self.own_profiler if on else None

    return SwitchedWorker


_NOTHING = nullcontext()


def plain_variant(method: Any) -> Any:
    """Return a registered method without the annotation that it has inside, None where it has none."""
    inner = method.__wrapped__
    if getattr(inner, "__code__", None) is None or inner.__code__.co_filename != profile_module.__file__:
        return None
    return register(**getattr(method, MAGIC_ATTR))(inner.__wrapped__)


def is_annotated(step: int) -> bool:
    """Whether a step has its annotations: of each two one, which of them left to chance."""
    first = random.Random(step // 2).random() < 0.5
    return first == (step % 2 == 0)


class SwitchedRunner(TaskRunner):
    """Trains with a worker and a trainer that switch before each step."""

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, Any]:
        """Take the usual worker, with a switch."""
        import ray

        from verl.trainer.ppo.utils import Role

        cls, group = super().add_actor_rollout_worker(config)
        cls = switched_worker(cls)
        self.role_worker_mapping[Role.ActorRollout] = ray.remote(cls)
        return cls, group

    def trainer_class(self) -> type:
        """Take the usual trainer, which switches before each step."""
        from verl.trainer.ppo import ray_trainer

        def plain_timer(name: str, timing: dict[str, float], **options: Any) -> Any:
            return simple_timer(name, timing)

        class SwitchedTrainer(ray_trainer.RayPPOTrainer):
            def _start_profiling(self, timing: dict[str, float]) -> None:
                on = is_annotated(self.global_steps)
                self.actor_rollout_wg.annotate(on)
                ray_trainer.marked_timer = marked_timer if on else plain_timer
                super()._start_profiling(timing)

        return SwitchedTrainer


def measure_run(model: str, data: str, steps: int, folder: str, more: Sequence[str]) -> list[str]:
    """Train, and return the figures of the steps with and without annotations."""
    from hydra import compose, initialize_config_module

    from verl.utils.observe.record import read_entries

    files = {"data.train_files": f"{data}/train.parquet", "data.val_files": f"{data}/test.parquet"}
    own = {"actor_rollout_ref.model.path": model, "trainer.total_training_steps": steps}
    keys = {**QUICK_START, **files, **own, "trainer.default_local_dir": folder}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*(f"{key}={value}" for key, value in keys.items()), *more])
    run_ppo(config, SwitchedRunner)
    entries = read_entries(Path(folder, "metrics.jsonl"))
    names = {"step": "timing_s/step", "gen": "timing_s/gen", "update_actor": "timing_s/update_actor"}
    return [_compared(entries, key, f"{name} of a run") for name, key in names.items()]


def _compared(entries: Mapping[int, Any], key: str, name: str) -> str:
    pairs = []
    for step in sorted(entries):
        if step > WARMUP_STEPS and step % 2 == 0 and step + 1 in entries:
            first, second = (entries[at]["data"][key] for at in (step, step + 1))
            pairs.append((first, second) if is_annotated(step) else (second, first))
    with_them, without = zip(*pairs, strict=True)
    return (
        f"{name}: {statistics.median(without):.3f} s without, ratio with to without {_median(with_them, without)}, "
        f"median of {len(pairs)} pairs"
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--model", help="a checkpoint; with --data, the run is measured too")
    parser.add_argument("--data", help="the folder of train.parquet and test.parquet")
    parser.add_argument("--steps", type=int, default=64)
    given, overrides = parser.parse_known_args()
    lines = [measure_method(0.0, given.rounds, 1000), measure_method(1.0, 5 * given.rounds, 1)]
    if given.model and given.data:
        with tempfile.TemporaryDirectory() as folder:
            lines += measure_run(given.model, given.data, given.steps, folder, overrides)
    for line in lines:
        get_console().info("%s", line)


if __name__ == "__main__":
    main()
