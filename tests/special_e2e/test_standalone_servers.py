"""Whole runs whose rollout has devices of its own: they give what the hybrid engine gives."""

import pytest

from verl.utils.observe.record import read_entries

from .features import GAP
from .test_async_rollout import ASYNC, SHORT, phases_of

APART = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "ray_kwargs.ray_init.num_cpus": 4,
}
ADAPTERS = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 16}
TWO_SERVERS = {"actor_rollout_ref.rollout.n_gpus_per_node": 2, "trainer.n_gpus_per_node": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    "apart, together",
    [
        pytest.param({}, {}, id="one server"),
        pytest.param(TWO_SERVERS, {"trainer.n_gpus_per_node": 2}, id="two servers"),
        pytest.param(ADAPTERS, ADAPTERS, id="adapters"),
    ],
)
def test_standalone_servers_equal_the_hybrid_engine(workspace, request, apart, together):
    """Tokens, log-probabilities, rewards, metrics and weights are equal bit for bit."""
    name = request.node.callspec.id.replace(" ", "_")
    hybrid = workspace.train(f"hybrid_{name}", SHORT | ASYNC | together)
    served = workspace.train(f"apart_{name}", SHORT | ASYNC | APART | apart)
    for step in hybrid.steps:
        assert served.numbers(step) == hybrid.numbers(step), f"step {step}"
    assert served.steps[2]["weight_sync/checksum_ok"] == 1
    assert served.steps[2]["weight_sync/servers"] == served_by(apart)
    digests = [
        [phases_of(entry) for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in (hybrid, served)
    ]
    assert digests[0] == digests[1]
    assert hybrid.steps[1]["actor/grad_norm"] > 0 and hybrid.steps[2][GAP] < 1e-4


def served_by(apart):
    return (APART | apart)["actor_rollout_ref.rollout.n_gpus_per_node"]


@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_dies_is_replaced_and_the_step_finishes(workspace, tmp_path, servers):
    """The run has the numbers of one without the death."""
    fault = {"VERL_FAULT": "kill:generate:rank=0:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    counted = {"actor_rollout_ref.rollout.n_gpus_per_node": servers}
    whole = workspace.train(f"whole_{servers}", SHORT | ASYNC | APART | counted)
    struck = workspace.train(f"struck_{servers}", SHORT | ASYNC | APART | counted, env=fault)
    assert (tmp_path / "fault").exists()
    for step in whole.steps:
        numbers = {key: value for key, value in struck.numbers(step).items() if not key.startswith("attempts/")}
        assert numbers == {key: value for key, value in whole.numbers(step).items() if not key.startswith("attempts/")}


@pytest.mark.full
@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "data_parallel_size"])
def test_a_server_of_two_devices_gives_what_one_of_one_device_gives(workspace, size):
    """Bit for bit, except that tensor parallelism rounds the engine's log-probabilities otherwise.

    They are not trained on: with the same tokens the weights are the same.
    """
    two = {"actor_rollout_ref.rollout.n_gpus_per_node": 2, f"actor_rollout_ref.rollout.{size}": 2}
    one = workspace.train("one_device", SHORT | ASYNC | APART)
    both = workspace.train(f"two_devices_{size}", SHORT | ASYNC | APART | two)
    same_engine = size == "data_parallel_size"
    for step in one.steps:
        assert without_engine(both.numbers(step), same_engine) == without_engine(one.numbers(step), same_engine)
        assert both.steps[step]["training/rollout_log_prob_diff_max"] < 1e-4  # fp32 rounding of two layers
    found = [list(map(phases_of, read_entries(run.folder / "metrics.jsonl").values())) for run in (one, both)]
    for phases in (phases for entries in found for phases in entries if not same_engine):
        for parts in phases.values():
            parts.pop("rollout_log_probs", None)
    assert found[0] == found[1]


def without_engine(numbers: dict[str, float], keep: bool = False) -> dict[str, float]:
    """Return metrics without those of the engine's log-probabilities, unless they are kept."""
    return {
        key: value for key, value in numbers.items() if keep or not key.startswith(("mismatch/", "training/rollout"))
    }
