"""The training engines on a GPU: the contract of one rank, whose reference is transformers on the CPU, and NCCL.

Tolerances are those of the contract on CPU: fp32 with sums of a few hundred terms in another order.
"""

import os
from contextlib import nullcontext
from threading import Event

import pytest
import torch
import torch.distributed as dist

from tests.waiting import wait_until
from tests.workers.engine import cases, megatron_cases, real_losses, sharing_cases
from tests.workers.engine.test_engine_contract import assert_output, assert_step
from verl.workers.engine.background_load import fill, load_in_background


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("engine")
    megatron_cases.write_models(root / "mcore")
    cases.write_model(root / "plain")
    cases.write_model(root / "tied", tie_word_embeddings=True)
    cases.write_family(root / "glm4_moe", "Glm4Moe", cases.SIGMOID)
    return root


def of_one_rank(every):
    return {name: case for name, case in every.items() if case.get("only_world", 1) == 1}


@pytest.fixture(scope="module")
def results(folder):
    cases.run_world(0, 1, folder, "", everything=True)
    return torch.load(folder / "world_1_rank_0.pt", map_location="cpu")


@pytest.fixture(scope="module")
def references(folder):
    found = {}
    for name in ("plain", "tied"):
        found[name] = cases.reference_step(cases.load(folder / name))
        found[name]["real loss"] = real_losses.reference(cases.load(folder / name), "language_model")
    return found


def assert_real_loss(found, expected):
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    for name, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, expected["gradients"][name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", of_one_rank(cases.CASES))
def test_fsdp_equals_plain_transformers(results, references, name):
    assert_output([results[name]], references["plain"]["output"])
    assert_step([results[name]], references["plain"])
    assert_real_loss(results[name]["real loss"], references["plain"]["real loss"])


@pytest.mark.parametrize("name", ["tied", "tied, fused"])
def test_fsdp_with_tied_embeddings(results, references, name):
    assert_output([results[name]], references["tied"]["output"])
    assert_step([results[name]], references["tied"])


@pytest.mark.parametrize("name", ["value", "value, padded"])
def test_fsdp_with_a_value_head(results, folder, name):
    head = {n: t for n, t in results[name]["before"].items() if n.startswith("score")}
    expected = cases.reference_step(cases.value_reference(folder / "plain", head), value_model=True)
    assert_output([results[name]], expected["output"])
    assert_step([results[name]], expected)


def test_triton_head_of_an_engine(folder, references):
    """``impl_backend=triton`` in the engine: outputs, a step of AdamW, and the gradient."""
    triton = cases.FUSED | {"fused_kernel_options": {"impl_backend": "triton"}}
    found = cases.run_case(folder, {"cut": cases.MICRO[2], "model": triton})
    on_cpu = torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, found)
    assert_output([on_cpu], references["plain"]["output"])
    assert_step([on_cpu], references["plain"])
    assert_real_loss(on_cpu["real loss"], references["plain"]["real loss"])


@pytest.mark.parametrize(
    "engine", [{}, {"strategy": "fsdp2", "param_offload": True}, {"offload_policy": True}], ids=str
)
def test_weights_arrive_after_the_start_of_another_engine(folder, engine):
    """Which may capture a graph and measure free memory meanwhile, of which the weights have their part already."""
    expected = cases.export(cases.build(folder / "plain", engine=engine))
    is_read, graph = Event(), torch.cuda.CUDAGraph()
    ones = torch.ones(8, device="cuda")
    with load_in_background():
        fill((), lambda: assert_soon(is_read))
        built = cases.build(folder / "plain", engine=engine)
        allocated = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph):
            is_read.set()
            fill((), lambda: is_read.clear() or ())
            assert_soon(is_read, False)
            twice = ones * 2
        assert torch.cuda.memory_allocated() - allocated <= 4096  # of the graph
    graph.replay()
    assert twice.sum() == 16
    weights = cases.export(built)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def assert_soon(event, is_set=True):
    """Wait for an event, or for its end."""
    wait_until(lambda: event.is_set() is is_set)
    return ()


BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_shared_prefixes_in_bf16(tmp_path, kind, strategy):
    """Flash attention over forests is as near to fp32 as rows one by one are, over eight mini-batches.

    In one of them the gradient of a critic, of which the sum of the errors of values is a large part, may be twice as
    near or as far.
    """
    cases.write_model(tmp_path / "model", hidden_size=128, num_attention_heads=4)
    made = {}
    for name, shares, engine in (("exact", False, {}), ("rows", False, BF16), ("shared", True, BF16)):
        made[name] = sharing_cases.build(tmp_path / "model", shares, kind, {"strategy": strategy, **engine})
    weights = [cases.export(engine) for engine in made.values()]  # the heads of critics are random, by a seed
    assert all(torch.equal(each[key], tensor) for each in weights for key, tensor in weights[0].items())
    squares = torch.zeros(2, 2)  # of the distances: of rows and forests, in outputs and gradients
    for seed in range(8):
        data = sharing_cases.groups(seed)
        data.meta_info.update(micro_batch_size_per_gpu=5)
        found = [(sharing_cases.outputs(e, data), sharing_cases.gradients(e, data)[1]) for e in made.values()]
        for at in range(2):  # the gradient as one vector: that of a key's bias is nothing but rounding
            exact, *others = (torch.cat([t.float().cpu().flatten() for t in each[at].values()]) for each in found)
            squares[:, at] += torch.stack([(each - exact).square().sum() for each in others])
    of_rows, of_forests = squares.sqrt()
    assert (of_forests > 0).all() and (of_forests <= 1.5 * of_rows).all(), (of_rows, of_forests)


@pytest.fixture(scope="module")
def one_rank_of_nccl(tmp_path_factory):
    from verl.utils.device import get_process_group_backend

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group(get_process_group_backend(), init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PLAIN, OFFLOADED = "one, plain optimizer", "one, offloaded"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("micro 1", OFFLOADED),
        ("micro 1", PLAIN),
        ("recompute", PLAIN),
        ("moonlight", PLAIN),
        ("llama, rope scaling, all biases", PLAIN),
        ("qwen2 moe", PLAIN),
    ],
)
def test_megatron_equals_plain_transformers(one_rank_of_nccl, folder, name, layout):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    import verl.workers.engine.megatron  # noqa: F401

    case, root = megatron_cases.CASES[name], folder / "mcore"
    found = megatron_cases.run_case(root, megatron_cases.LAYOUTS[1][layout] | {"dtype": "fp32"}, case)
    parallel_state.destroy_model_parallel()
    on_cpu = torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, found)
    model = cases.load(root / case.get("folder", "plain"))
    expected = cases.reference_step(model)
    expected["weights"] = cases.under_checkpoint_names(model, expected["weights"] | cases.saved_buffers(model))
    assert_output([on_cpu], expected["output"])
    assert_step([on_cpu], expected)


@pytest.mark.parametrize("distributed", [True, False])
def test_megatron_weights_arrive_after_the_optimizer(one_rank_of_nccl, folder, distributed):
    """In half precision, of which the optimizer holds copies in fp32: a step gives the same weights."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    import verl.workers.engine.megatron  # noqa: F401

    settings = {"dtype": "bf16", "use_distributed_optimizer": distributed}
    weights = []
    for is_late in (False, True):
        with load_in_background() if is_late else nullcontext():
            engine = megatron_cases.build(folder / "mcore" / "plain", settings)
            if is_late:
                for parameter in engine.models[0].parameters():
                    parameter.data.fill_(torch.nan)
        with engine.train_mode():
            engine.train_batch(cases.batch(**cases.MICRO[4]), cases.loss_fn)
        weights.append(cases.export(engine))
    parallel_state.destroy_model_parallel()
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
