"""Two ranks that build, fill, run, move and read models by the established helpers, and share the files of a model."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks import note
from tests.workers.engine import cases
from tests.workers.engine.cases import load
from tests.workers.engine.megatron_cases import CP, EP, LAYERS, PP, TP, VPP
from verl.errors import ModelWeightsError
from verl.utils import megatron_utils as helpers
from verl.workers.config import HFModelConfig, McoreEngineConfig
from verl.workers.engine import EngineRegistry

LAYOUTS = {"tp 2": TP, "pp 2 x 2 virtual": VPP, "cp 2": CP, "ep 2": EP}
SHARING = {"tp 2": TP, "pp 2": PP, "dp 2": {}}


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    tempfile.tempdir = str(folder / "tmp")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from verl.workers.engine.megatron.layout import make_layout

    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        note(f"helpers, {name}")
        make_layout(McoreEngineConfig(**layout))
        use_helpers(folder / ("qwen3_moe" if layout is EP else "plain"), name)
        leave_layout()
    for name, layout in SHARING.items():
        note(f"sharing, {name}")
        results[name] = share(rank, folder, layout)
        leave_layout()
    torch.save(results, folder / f"rank_{rank}.pt")


def leave_layout() -> None:
    from megatron.core import parallel_state

    gc.collect()
    parallel_state.destroy_model_parallel()


# ---- established helpers


def use_helpers(path: Path, layout: str) -> None:
    from verl.models.mcore import get_mcore_weight_converter, hf_to_mcore_config
    from verl.models.weight_loader_registry import get_weight_loader, get_weight_saver

    hf_config = cases.model_config(path).hf_config
    (arch,) = hf_config.architectures
    tf_config = hf_to_mcore_config(hf_config, torch.float32)
    same = helpers.convert_config(hf_config, helpers.mcore_model_parallel_config(layout == "tp 2", torch.float32))
    assert same.sequence_parallel is tf_config.sequence_parallel is (layout == "tp 2")
    assert same.pipeline_model_parallel_size == tf_config.pipeline_model_parallel_size
    wrap = helpers.McoreModuleWrapperConfig(use_distributed_optimizer=False)
    chunks = helpers.make_megatron_module(wrap, tf_config, hf_config)
    assert len(chunks) == (2 if "virtual" in layout else 1)
    stored = load_file(path / "model.safetensors")
    get_weight_loader(arch)(stored, chunks, hf_config, torch.float32)
    for converter in (None, get_mcore_weight_converter(hf_config)):
        equal(dict(helpers.per_tensor_generator(chunks, hf_config, converter)), stored)
    saved = get_weight_saver(arch)(chunks, hf_config, torch.float32)
    equal(saved, stored if dist.get_rank() == 0 else {})
    helpers.offload_megatron_model_to_cpu(chunks)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    assert all(p.untyped_storage().nbytes() == 0 for p in parameters)
    helpers.load_megatron_model_to_gpu(chunks, load_grad=False)
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in chunks[0].buffers)
    helpers.load_megatron_model_to_gpu(chunks)
    equal(dict(helpers.per_tensor_generator(chunks, hf_config, None)), stored)
    if layout != "ep 2":
        (run_pipeline if "pp" in layout else run_forward)(chunks, hf_config, load(path))


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert not wrong, wrong


def log_probs_of(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    return {"log_probs": vocab_parallel_log_probs_from_logits(logits, labels)}


def expectation(model: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return a batch, and of plain transformers the logits and the log-probability of the token behind each."""
    data = cases.tensors()
    names = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{name: data[name] for name in names}, use_cache=False).logits
    labels = data["input_ids"].roll(-1, dims=1)
    return data | {"labels": labels}, logits, torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def run_forward(chunks: list[Any], hf_config: Any, model: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from verl.models.mcore import get_mcore_forward_fn, get_mcore_forward_fused_fn, get_mcore_forward_no_padding_fn
    from verl.models.mcore.gpt.export import exported_weights

    data, logits, expected = expectation(model)
    mask = data["attention_mask"].bool()
    inputs = (data["input_ids"], data["attention_mask"], data["position_ids"])
    forward = get_mcore_forward_fn(hf_config)
    processed = {"logits_processor": log_probs_of, "logits_processor_args": {"labels": data["labels"]}}
    close(forward(chunks[0], *inputs, **processed)["log_probs"], expected * mask)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        close(forward(chunks[0], *inputs), logits * mask.unsqueeze(-1))
    ids, labels = (
        torch.nested.nested_tensor([rows[row] for rows, row in zip(data[name], mask, strict=True)], layout=torch.jagged)
        for name in ("input_ids", "labels")
    )
    found = get_mcore_forward_no_padding_fn(hf_config)(
        chunks[0], ids, logits_processor=log_probs_of, logits_processor_args={"labels": labels}
    )
    close(found["log_probs"].values(), expected[mask])
    asked = torch.zeros_like(mask)
    asked[:, cases.PROMPT - 1 : -1] = data["response_mask"].bool()
    output = get_mcore_forward_fused_fn(hf_config)(
        chunks[0], inputs[0], inputs[2], inputs[1], data["labels"], asked, cases.TEMPERATURE
    )
    log_p = torch.log_softmax(logits / cases.TEMPERATURE, -1)
    chosen = log_p.gather(-1, data["labels"].unsqueeze(-1)).squeeze(-1) * asked
    close(output.log_probs, chosen)
    close(output.entropy, -(log_p.exp() * log_p).sum(-1) * asked)
    chunks[0].zero_grad_buffer()
    weights = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    (output.log_probs * weights).sum().backward()
    (chosen * weights).sum().backward()
    finalize_model_grads(chunks, None)
    inner = helpers.unwrap_model(chunks)
    grads = dict(exported_weights(inner, hf_config, False, of=lambda p: getattr(p, "main_grad", None)))
    for name, parameter in model.named_parameters():
        close(grads[name], parameter.grad, name)


def run_pipeline(chunks: list[Any], hf_config: Any, model: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from verl.models.mcore import get_mcore_forward_fn
    from verl.utils.megatron.pipeline_parallel import compute_transformers_input_shapes, make_batch_generator

    data, _, expected = expectation(model)
    parts = [{name: value.chunk(2)[at] for name, value in data.items()} for at in (0, 1)]
    shapes = compute_transformers_input_shapes(parts, {"hidden_size": 64, "sequence_parallel": False})
    assert shapes == [torch.Size([int(part["attention_mask"].sum()), 1, 64]) for part in parts]
    forward, outputs = get_mcore_forward_fn(hf_config), list[Tensor]()

    def step(iterator: Any, chunk: Any) -> Any:
        rows = next(iterator)
        output = forward(
            chunk, rows["input_ids"], rows["attention_mask"], rows["position_ids"], logits_processor=log_probs_of,
            logits_processor_args={"labels": rows["labels"]},
        )  # fmt: skip

        def finish(value: Any) -> Any:
            outputs.append(value["log_probs"])
            return torch.zeros(()), torch.zeros((), dtype=torch.int), {}

        return output, finish

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=make_batch_generator(parts, len(chunks)), model=chunks,
            num_microbatches=2, seq_length=1, micro_batch_size=1, forward_only=True,
        )  # fmt: skip
    if parallel_state.is_pipeline_last_stage():
        close(torch.cat(outputs), expected * data["attention_mask"])


def close(found: Tensor, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-5, rtol=1e-5, msg=lambda text: what + text)


# ---- files that one node has


def share(rank: int, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Build engines of which rank 1 has no files, and return what came to it and what went wrong."""
    received: list[int] = []
    original = dist.recv

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.recv = counting
    try:
        engine: Any = shared_engine(rank, folder, "plain", layout)
        engine.initialize()
    finally:
        dist.recv = original
    result: dict[str, Any] = {
        "weights": cases.export(engine),
        "received": [size for size in received if size != 8],
        "parameters": [p.nbytes for model in engine.models for p in model.parameters()],
        "folder": str(engine.model_config.local_path),
        "wrong": {},
    }
    critic = shared_engine(rank, folder, "plain", layout, "value_model")
    critic.initialize()
    result["head"] = cases.export(critic)["score.weight"]
    for name in ("lacking", "short"):
        try:
            shared_engine(rank, folder, name, layout).initialize()
        except ValueError as error:
            result["wrong"][name] = str(error)
    result["wrong"]["late"] = read_error(rank, folder, layout)
    unloaded = shared_engine(rank, folder, "plain", layout, load_weight=False)
    unloaded.initialize()
    result["new"] = cases.export(unloaded)
    return result


def read_error(rank: int, folder: Path, layout: dict[str, Any]) -> str:
    """Return what is said of a disk that fails in the middle."""
    from verl.workers.engine.weights import SafetensorsReader

    original = SafetensorsReader.read

    def failing(reader: Any, name: str, *args: Any) -> Tensor:
        if name == "model.layers.3.mlp.up_proj.weight":
            raise ModelWeightsError("cannot read the weights file")
        return original(reader, name, *args)

    SafetensorsReader.read = failing  # type: ignore[method-assign]
    try:
        shared_engine(rank, folder, "plain", layout).initialize()
    except ModelWeightsError as error:
        return str(error)
    finally:
        SafetensorsReader.read = original  # type: ignore[method-assign]
    return "nothing"


def shared_engine(
    rank: int, folder: Path, name: str, layout: dict[str, Any], kind: str = "language_model", **options: Any
) -> Any:
    path = folder / name if rank == 0 else folder / "elsewhere" / name
    return EngineRegistry.new(
        kind,
        "megatron",
        model_config=HFModelConfig(path=str(path), load_tokenizer=False, enable_gradient_checkpointing=False),
        engine_config=McoreEngineConfig(**layout, share_model_files=True, forward_only=True),
        optimizer_config=None,
        checkpoint_config=None,
        **options,
    )


def write_models(folder: Path) -> None:
    """Write a model, one that lacks a tensor of its last layer and one whose file ends too early."""
    from safetensors.torch import save_file

    from tests.workers.engine import megatron_cases

    megatron_cases.write_models(folder)
    (folder / "tmp").mkdir()
    for name in ("lacking", "short"):
        cases.write_model(folder / name, **LAYERS)
        file = folder / name / "model.safetensors"
        stored = load_file(file)
        if name == "lacking":
            del stored["model.layers.3.mlp.up_proj.weight"]
            save_file(stored, file)
        else:
            file.write_bytes(file.read_bytes()[:-1000])
