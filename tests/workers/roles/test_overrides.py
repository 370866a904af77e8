"""The methods of the worker and of its actor that forks override: their versions run."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from examples.tiny_model import make_tiny_model
from tests.workers.engine import cases, real_losses
from tests.workers.rollout import tiny
from verl.protocol import DataProto
from verl.trainer.config.cli import CONFIG_DIR
from verl.workers.actor import DataParallelPPOActor
from verl.workers.engine.weights import SafetensorsReader
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.roles import actor_rollout_ref
from verl.workers.rollout import HFRollout

OVERRIDES = {
    "actor.ppo_mini_batch_size": cases.ROWS // 2,
    "actor.ppo_micro_batch_size_per_gpu": 3,
    "actor.entropy_coeff": 0.01,
    "actor.optim.lr": cases.LR,
    "actor.optim.total_training_steps": 4,
    "model.use_remove_padding": True,
    "model.enable_gradient_checkpointing": False,
    "rollout.name": "hf",
    "rollout.n": 1,
    "rollout.temperature": cases.TEMPERATURE,
    "rollout.prompt_length": tiny.PROMPT_LENGTH,
    "rollout.response_length": tiny.RESPONSE_LENGTH,
    "rollout.dtype": "float32",
    "rollout.log_prob_micro_batch_size_per_gpu": 3,
    "ref.log_prob_micro_batch_size_per_gpu": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(str(path), hidden_size=64, num_layers=2, seed=0)
    return path


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a worker of a class in this process."""
    monkeypatch.setattr("verl.workers.roles.base.initialize_global_process_group_ray", lambda timeout_second: None)
    monkeypatch.setattr("verl.single_controller.base.Worker.__init__", lambda self: None)
    for name, value in (("rank", 0), ("world_size", 1), ("seconds_by_call", {})):
        monkeypatch.setattr(ActorRolloutRefWorker, name, value, raising=False)
    monkeypatch.setattr(ActorRolloutRefWorker, "_register_dispatch_collect_info", lambda *args: None)
    monkeypatch.setattr(ActorRolloutRefWorker, "_mesh", lambda self, name: (0, True))
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        words = [f"actor_rollout_ref.{key}={value}" for key, value in OVERRIDES.items()]
        node = compose("ppo_trainer", [*words, f"actor_rollout_ref.model.path={folder}"]).actor_rollout_ref

    def start(cls: type[ActorRolloutRefWorker], role: str = "actor_rollout", external_lib: str | None = None) -> Any:
        own = node.copy()
        own.model.external_lib = external_lib
        worker = cls(own, role)
        worker.init_model()
        return worker

    return start


def asked() -> DataProto:
    return real_losses.batch(list(range(cases.ROWS)))


def requests() -> DataProto:
    """Prompts as the loop of a fork sends them: without seeds, step and end tokens."""
    batch = tiny.prompts_batch(4)
    del batch.batch["sampling_seed"]
    batch.meta_info = {}
    return batch


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in worker.actor_module_fsdp.named_parameters()}


def test_the_model_and_optimizer_that_a_subclass_returns_are_trained(start: Any) -> None:
    class Frozen(ActorRolloutRefWorker):
        def _build_model_optimizer(self, *args: Any, role: str = "actor", **kwargs: Any) -> Any:
            module, _, scheduler, config = super()._build_model_optimizer(*args, role=role, **kwargs)
            module.get_input_embeddings().weight.requires_grad_(False)
            trained = [p for p in module.parameters() if p.requires_grad]
            self.mine = torch.optim.SGD(trained, lr=0.5)
            return module, self.mine, scheduler, config

    worker = start(Frozen)
    before = weights(worker)
    metrics = worker.update_actor(asked()).meta_info["metrics"]
    assert worker.actor_optimizer is worker.engine.optimizer is worker.mine and metrics["actor/grad_norm"] > 0
    same = {name for name, value in weights(worker).items() if torch.equal(value, before[name])}
    assert same == {"model.embed_tokens.weight"}
    assert all(torch.isfinite(value).all() for value in weights(worker).values())


def test_weights_arrive_while_the_rollout_starts(start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where code of a user may read them, they are there as soon as the model is."""
    started = threading.Event()
    build, read = ActorRolloutRefWorker._build_rollout, SafetensorsReader.read

    def build_rollout(self: Any, *args: Any, **kwargs: Any) -> None:
        started.set()
        build(self, *args, **kwargs)

    def read_later(self: Any, *args: Any) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert started.wait(300), "the rollout starts after the weights have been read"
            in_thread.append(args[0])
        return read(self, *args)

    in_thread: list[str] = []
    monkeypatch.setattr(ActorRolloutRefWorker, "_build_rollout", build_rollout)
    monkeypatch.setattr(SafetensorsReader, "read", read_later)
    expected = cases.load(folder).state_dict()
    worker = start(ActorRolloutRefWorker, "actor_rollout_ref")
    assert in_thread == 2 * list(weights(worker))
    for engine in (worker.engine, worker.ref_engine):
        assert all(torch.equal(value, expected[name]) for name, value in engine.local_parameters())
    assert torch.equal(worker.compute_log_prob(asked()).batch["old_log_probs"],
                       worker.compute_ref_log_prob(asked()).batch["ref_log_prob"])  # fmt: skip

    class Reads(ActorRolloutRefWorker):
        def _build_model_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            built = super()._build_model_optimizer(*args, **kwargs)
            assert all(torch.equal(value, expected[name]) for name, value in built[0].named_parameters())
            return built

    in_thread.clear()
    start(Reads)
    start(ActorRolloutRefWorker, external_lib="json")
    assert not in_thread


def test_arguments_that_a_subclass_changes_count(start: Any) -> None:
    class Padded(ActorRolloutRefWorker):
        def _build_model_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            assert kwargs["use_remove_padding"] and kwargs["role"] == "actor"
            return super()._build_model_optimizer(*args, **kwargs | {"use_remove_padding": False})

    worker, plain = start(Padded), start(ActorRolloutRefWorker)
    assert plain.engine.forward.remove_padding and not worker.engine.forward.remove_padding
    mine, theirs = (each.compute_log_prob(asked()).batch["old_log_probs"] for each in (worker, plain))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_model_that_a_subclass_builds_whole(start: Any, folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    class Whole(ActorRolloutRefWorker):
        def _build_model_optimizer(self, model_path: str, **kwargs: Any) -> Any:
            module = Qwen2ForCausalLM.from_pretrained(model_path)
            optimizer = torch.optim.AdamW(module.parameters(), lr=cases.LR, weight_decay=0.01)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return module, optimizer, scheduler, module.config

    outputs = []
    for cls in (ActorRolloutRefWorker, Whole):
        worker = start(cls)
        worker.update_actor(asked())
        outputs.append(worker.compute_log_prob(asked()).batch["old_log_probs"])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_switches_between_training_and_generation(start: Any, asynchronous: bool) -> None:
    calls: list[str] = []

    class Asynchronous(ActorRolloutRefWorker):
        async def rollout_mode(self) -> None:
            calls.append("rollout")
            await super().rollout_mode()

        async def trainer_mode(self) -> None:
            calls.append("trainer")
            await super().trainer_mode()

    class Plain(ActorRolloutRefWorker):
        def rollout_mode(self) -> None:  # type: ignore[override]
            calls.append("rollout")
            self.sharding_manager.__enter__()

        def trainer_mode(self) -> None:  # type: ignore[override]
            calls.append("trainer")
            self.sharding_manager.__exit__(None, None, None)

    worker = start(Asynchronous if asynchronous else Plain)
    output = worker.generate_sequences(requests())
    assert calls == ["rollout", "trainer"] and worker.rollout.weights_version == worker.engine.weights_version
    assert len(output) == 4 and output.meta_info["timing"]["generate_sequences"] > 0
    worker.sync_weights()
    worker.update_actor(asked())  # nothing was synced: the rollout has slept all the time
    worker.sync_weights()
    worker.compute_log_prob(asked())  # takes the devices back from a rollout that has not generated
    assert calls == ["rollout", "trainer", "trainer"]


def test_a_rollout_that_a_subclass_builds(start: Any) -> None:
    class Mine(HFRollout):
        pass

    class Other(ActorRolloutRefWorker):
        def _build_rollout(self, trust_remote_code: bool = False) -> None:
            self.rollout = Mine(self.rollout_config, self.model_config, None)

    worker = start(Other)
    worker.generate_sequences(requests())
    assert isinstance(worker.rollout, Mine) and worker.sharding_manager.rollout is worker.rollout


def test_an_engine_that_starts_apart_begins_before_the_model_is_built(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    class Observed(ActorRolloutRefWorker):
        def _build_actor(self) -> None:
            events.append("model")
            super()._build_actor()

    class Own(Observed):
        def _build_rollout(self, trust_remote_code: bool = False) -> None:
            super()._build_rollout(trust_remote_code)

    begin = HFRollout.__init__

    def beginning(self: HFRollout, *args: Any) -> None:
        events.append("engine")
        begin(self, *args)

    monkeypatch.setattr(actor_rollout_ref, "read_ahead", lambda folder: events.append("read"))
    monkeypatch.setattr(HFRollout, "import_engine", classmethod(lambda cls, config: events.append("import")))
    monkeypatch.setattr(HFRollout, "__init__", beginning)
    monkeypatch.setattr(HFRollout, "wait_until_started", lambda self: events.append("wait"))
    for apart, worker_class, expected in (
        (False, Observed, ["read", "import", "model", "engine", "wait"]),
        (True, Observed, ["read", "import", "engine", "model", "wait"]),
        (True, Own, ["read", "import", "model", "engine", "wait"]),  # which may read what the worker has built before
    ):
        monkeypatch.setattr(HFRollout, "starts_apart", classmethod(lambda cls, apart=apart: apart))
        events.clear()
        worker = start(worker_class)
        assert events == expected and worker.sharding_manager.rollout is worker.rollout
    events.clear()
    start(Observed, "actor")
    assert events == ["read", "model"]


def test_requests_without_seeds_differ_by_call_and_update_and_repeat_in_another_run(start: Any) -> None:
    def run() -> list[Any]:
        worker = start(ActorRolloutRefWorker)
        drawn = [worker.generate_sequences(requests()).batch["responses"].tolist() for _ in range(2)]
        worker.update_actor(asked())
        assert worker.engine.schedule_steps == 1
        return [*drawn, worker.generate_sequences(requests()).batch["responses"].tolist()]

    first, second, third = run()
    assert first != second != third != first
    assert run() == [first, second, third]


class CountingActor(DataParallelPPOActor):
    """Overrides the two private methods that forks override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Any] = []
        super().__init__(*args, **kwargs)

    def _forward_micro_batch(self, micro_batch: Any, temperature: float, calculate_entropy: bool = False) -> Any:
        self.calls.append((len(micro_batch["responses"]), temperature, calculate_entropy))
        return super()._forward_micro_batch(micro_batch, temperature, calculate_entropy=calculate_entropy)

    def _optimizer_step(self) -> torch.Tensor:
        self.calls.append("step")
        norm = torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), max_norm=self.config.grad_clip)
        assert self.actor_optimizer is not None
        self.actor_optimizer.step()
        self.actor_optimizer.zero_grad()
        return norm


class OwnActorWorker(ActorRolloutRefWorker):
    """Sets an actor of its own, as forks do after the model is built."""

    actor_class: type[DataParallelPPOActor] = CountingActor

    def init_model(self) -> None:
        super().init_model()
        self.actor = self.actor_class(
            config=self.config.actor, actor_module=self.actor_module_fsdp, actor_optimizer=self.actor_optimizer
        )


def test_the_private_methods_of_an_actor_of_a_subclass_run_in_every_pass(start: Any) -> None:
    worker, plain = start(OwnActorWorker), start(ActorRolloutRefWorker)
    mine, theirs = (each.compute_log_prob(asked()) for each in (worker, plain))
    assert torch.equal(mine.batch["old_log_probs"], theirs.batch["old_log_probs"])
    assert worker.actor.calls == [
        (3, cases.TEMPERATURE, True),
        (3, cases.TEMPERATURE, True),
        (2, cases.TEMPERATURE, True),
    ]
    worker.actor.calls.clear()
    metrics = [each.update_actor(asked()).meta_info["metrics"] for each in (worker, plain)]
    sizes = [call if call == "step" else call[0] for call in worker.actor.calls]
    assert sizes == [3, 1, "step", 3, 1, "step"]
    assert metrics[0]["actor/pg_loss"] == pytest.approx(metrics[1]["actor/pg_loss"], rel=1e-5)
    assert worker.engine.weights_version == plain.engine.weights_version == 2  # so that the rollout is synced
    for name, value in weights(plain).items():
        # Adam divides by the size of the gradient: near zero, a difference of its last bits is part of a whole step.
        torch.testing.assert_close(weights(worker)[name], value, atol=1e-4, rtol=1e-4)


def test_an_actor_of_a_subclass_may_update_by_itself(start: Any) -> None:
    class Mine(CountingActor):
        def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> Any:
            assert data.meta_info["micro_batch_size"] == 3 and data.meta_info["temperature"] == cases.TEMPERATURE
            self.calls.append("log_prob")
            return super().compute_log_prob(data, calculate_entropy)

        def update_policy(self, data: DataProto) -> Any:
            self.calls.append("update")
            assert self.config.ppo_mini_batch_size == cases.ROWS // 2
            _, log_probs = self._forward_micro_batch(dict(data.batch), data.meta_info["temperature"])
            (-(log_probs * data.batch["advantages"]).mean()).backward()
            return {"actor/mine": [1.0, 3.0], "actor/grad_norm": [float(self._optimizer_step())]}

    class Worker(OwnActorWorker):
        actor_class = Mine

    worker = start(Worker)
    output = worker.compute_log_prob(asked())
    assert worker.actor.calls[0] == "log_prob" and output.batch["old_log_probs"].shape == output.batch["entropys"].shape
    before = weights(worker)
    metrics = worker.update_actor(asked()).meta_info["metrics"]
    assert "update" in worker.actor.calls and metrics["actor/mine"] == 2.0 and metrics["actor/lr"] > 0
    assert worker.engine.weights_version == 1 and not torch.equal(
        before["lm_head.weight"], weights(worker)["lm_head.weight"]
    )
