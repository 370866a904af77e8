"""``main_generation_server`` with a real server: greedy responses are those of transformers."""

import os
import re
import signal
import time
from contextlib import suppress

import pyarrow.parquet as pq
import pytest
import ray
from hydra import compose, initialize_config_dir

from tests.experimental.agent_loop.token_server import TokenServer
from tests.trainer.test_main_generation import QUESTIONS, folder, handlers, reference, vision_folder
from tests.workers.rollout.test_standalone import Mortal
from verl.errors import ServerError
from verl.trainer import generation_server, main_generation_server
from verl.trainer.config.cli import CONFIG_DIR
from verl.utils.process.owner import Ownership
from verl.workers.rollout import standalone

__all__ = ["folder", "handlers", "vision_folder"]  # fixtures


def build(folder, output, *more):
    options = [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"data.train_files={folder}/prompts.parquet",
        f"data.output_path={output}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=true",
        *more,
    ]
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose("generation_server", options)


@pytest.mark.full
def test_greedy_responses_are_those_of_transformers(ray_cluster, folder, tmp_path):
    output = tmp_path / "out" / "x.parquet"
    greedy = ("actor_rollout_ref.rollout.temperature=0", "data.train_batch_size=3")
    main_generation_server.run_generation_server(build(folder, output, *greedy))
    table = pq.read_table(output)
    assert table["responses"].to_pylist() == reference(folder)
    assert table["number"].to_pylist() == list(range(len(QUESTIONS)))


def test_a_server_whose_engine_has_died_starts_again(ray_cluster, folder, tmp_path, monkeypatch, caplog):
    def mortal_class_of(config):
        return type("Mortals", (standalone.replica_class_of(config),), {"server_class": Mortal})

    monkeypatch.setattr(generation_server, "replica_class_of", mortal_class_of)
    with Ownership() as owner:
        generation = main_generation_server.prepare(build(folder, tmp_path / "x.parquet"), owner)
    with generation._workers() as (server,):
        pid = found = ray.get(server.ready.remote())["pid"]
        ray.get(server.lose_engine.remote())
        while found == pid:
            time.sleep(0.1)
            with suppress(ServerError, ray.exceptions.RayActorError):  # it is about to end, or starts
                found = ray.get(server.ready.remote())["pid"]
    assert "rollout server vllm_server_0_0 starts again: " in caplog.text
    assert "the engine has died" in caplog.text


@pytest.mark.full
def test_the_only_engine_that_dies_is_replaced_and_no_response_changes(ray_cluster, folder, tmp_path, monkeypatch):
    generate = generation_server.ServerGeneration._generate
    killed = []

    def killing(self, servers, rows):
        if not killed:
            killed.append(ray.get(servers[0].ready.remote())["engine_pids"][-1])
            os.kill(killed[0], signal.SIGKILL)
        return generate(self, servers, rows)

    monkeypatch.setattr(generation_server.ServerGeneration, "_generate", killing)
    output = tmp_path / "x.parquet"
    greedy = ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.server.max_start_wait_time=100000")
    main_generation_server.run_generation_server(build(folder, output, *greedy))
    assert killed and pq.read_table(output)["responses"].to_pylist() == reference(folder)


def test_requests_reach_the_servers_as_they_are_meant(folder, tmp_path, caplog):
    """Prompts as tokens, a seed for each sample, the sampling of the run, and responses in their order."""
    with Ownership() as owner:
        changes = ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.top_p=0.5")
        changes += ("+data.apply_chat_template_kwargs.enable_thinkng=true",)
        generation = main_generation_server.prepare(build(folder, tmp_path / "x.parquet", *changes), owner)
    servers = [TokenServer(generation.tokenizer, lambda prompt: prompt[9:12]) for _ in range(2)]
    found = generation._generate(servers, [3, 0])
    assert found == [["ame"] * 2, ["+1="] * 2]  # of "<|user|>Name ..." and "<|user|>1+1=?"
    asked = [(prompt, params) for server in servers for _, prompt, params in server.asked]
    assert len(asked) == 4 and len({params["seed"] for _, params in asked}) == 4
    assert all(prompt in generation.prompts for prompt, _ in asked)
    assert {(params["temperature"], params["top_p"], params["max_tokens"]) for _, params in asked} == {(1.0, 0.5, 8)}
    assert "the chat template does not read enable_thinkng=true: without effect" in caplog.text


def test_images_reach_the_servers(vision_folder, tmp_path):
    with Ownership() as owner:
        changes = ("actor_rollout_ref.rollout.n=2", "data.image_key=pictures", "data.max_prompt_length=64")
        generation = main_generation_server.prepare(build(vision_folder, tmp_path / "x.parquet", *changes), owner)
    server = TokenServer(generation.tokenizer, lambda prompt: "red")
    assert generation._generate([server], [2, 0]) == [["red"] * 2] * 2
    shown = [[] if media is None else [image.getpixel((0, 0)) for image in media["image"]] for media in server.media]
    assert sorted(shown) == [[], [], *[[(255, 0, 0), (0, 0, 255)]] * 2]
    assert {tuple(prompt) for _, prompt, _ in server.asked} == {tuple(generation.prompts[row]) for row in (2, 0)}
    assert len({params["seed"] for _, _, params in server.asked}) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.train_files=[a.parquet,b.parquet]"], r"data\.train_files=.*must be one parquet file"),
        (["data.train_files=/nowhere.parquet"], r"data\.train_files=.*/nowhere\.parquet.*no such file"),
        (
            ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.temperature=0"],
            r"rollout\.n=2.* without sampling",
        ),
        (["actor_rollout_ref.rollout.ignore_eos=true"], r"rollout\.ignore_eos=true: must be false"),
        (["actor_rollout_ref.rollout.top_p=2"], r"actor_rollout_ref\.rollout\.top_p=2"),
        (["+actor_rollout_ref.model.override_config.rope_thta=1e6"], "names rope_thta, which the model does not read"),
        (["actor_rollout_ref.model.path=/no/such/model"], r"actor_rollout_ref\.model\.path=.*/no/such/model"),
    ],
)
def test_what_is_refused_before_ray(folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit:
        main_generation_server.run_generation_server(build(folder, tmp_path / "x.parquet", *more))
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
