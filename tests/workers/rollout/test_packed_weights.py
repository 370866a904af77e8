"""Products with packed weights: their values, what a sync reads back, and that no response depends on its batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workers.rollout import tiny
from verl.utils.numerics.blocks import on_blocks
from verl.utils.numerics.packed import PackedProduct

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN"),
]


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["tied", "untied"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = tiny.build_model(tied=request.param)
    rollout = tiny.start_rollout("vllm", model, tmp_path_factory.mktemp("vllm"), pack_weights=True)
    tiny.load_all(rollout, model)
    yield rollout, model
    rollout.shutdown()


@pytest.mark.parametrize("sizes", [(64, 96), (40, 131), (256, 512)], ids=str)
def test_packed_products(sizes: tuple[int, int]) -> None:
    columns, outputs = sizes
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(outputs, columns, generator=draw), torch.randn(outputs, generator=draw)
    x = torch.randn(300, columns, generator=draw)
    product = PackedProduct(weight, on_blocks=True)
    assert product.weight().equal(weight)
    whole = product(x, weight, bias)
    # One product of 64 to 256 terms of size 1 in each result: a few ulp of its largest partial sum.
    torch.testing.assert_close(whole.double(), x.double() @ weight.T.double() + bias, atol=1e-4, rtol=1e-5)
    for count in (1, 15, 16, 47, 150):
        assert product(x[:count], weight, bias).equal(whole[:count])
    assert on_blocks(lambda rows: product._product(rows, weight, bias), x).equal(whole)
    free = PackedProduct(weight, on_blocks=False)(x.view(3, 100, columns), weight)
    torch.testing.assert_close(free.view(300, outputs) + bias, whole)


def packed_of(rollout: Any) -> dict[str, PackedProduct]:
    model = rollout._llm.collective_rpc(lambda worker: worker)[0].model_runner.get_model()
    found = {path: vars(layer).get("cpu_linear") for path, layer in model.named_modules(remove_duplicate=False)}
    return {path: product for path, product in found.items() if isinstance(product, PackedProduct)}


def test_each_sync_packs_again_and_reads_what_it_packed(started: Any) -> None:
    rollout, model = started
    batch = tiny.prompts_batch(5, repeat=3)
    packed = packed_of(rollout)
    assert len([path for path in packed if "layers." in path]) == 4 * model.config.num_hidden_layers
    assert "lm_head" in packed
    for step in (0.0, 0.05):
        tiny.disturb(model, step, seed=5)
        tiny.load_all(rollout, model)
        found = rollout.weights_checksum()
        due = dict(rollout.source_checksum(name, value) for name, value in model.named_parameters())
        assert found == {name: int(value) for name, value in due.items()}
        output = rollout.generate_sequences(batch)
        expected = tiny.reference_log_probs(model, output, tiny.TEMPERATURE)
        torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=5e-5, rtol=0)
    assert all(packed_of(rollout)[path] is not packed[path] for path in packed)
    # A weight that only the products use is the one that is read back.
    path = "model.layers.0.mlp.down_proj"
    packed_of(rollout)[path]._packed = PackedProduct(torch.zeros(128, 192), on_blocks=True)._packed
    wrong = rollout.weights_checksum()
    assert [name for name, value in found.items() if wrong[name] != value] == [path + ".weight"]
    head = packed_of(rollout)["lm_head"]
    head._packed = PackedProduct(head.weight() + 1, on_blocks=True)._packed
    with pytest.raises(RuntimeError, match="packed output layer"):
        rollout.weights_checksum()
    tiny.load_all(rollout, model)
    assert rollout.weights_checksum() == found


def test_an_update_that_fails_leaves_plain_products(started: Any) -> None:
    rollout, model = started
    rollout.begin_update()
    assert not packed_of(rollout)
    rollout.abort_update()
    assert not packed_of(rollout)
    tiny.load_all(rollout, model)
    assert packed_of(rollout)


def test_a_response_does_not_depend_on_its_batch(started: Any) -> None:
    rollout, _ = started
    batch = tiny.prompts_batch(7, seed=3, repeat=3)
    whole = rollout.generate_sequences(batch)
    for rows in ([4], [20, 0, 9], list(range(20, 2, -1))):
        part = rollout.generate_sequences(batch[rows])
        assert part.batch["responses"].equal(whole.batch["responses"][rows])
        assert part.batch["rollout_log_probs"].equal(whole.batch["rollout_log_probs"][rows])
