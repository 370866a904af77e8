"""Measure passes over samples of prompts with an image, whose tower runs once for each prompt or for each sample.

The model is a Qwen2.5-VL of 7B with an eighth of its widths and a quarter of its layers, in fp32, in one process.
Times are CPU seconds.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

IMAGE = 990
VIDEO = 991
START = 992
END = 993
VOCABULARY = 1000


def model_config() -> Any:
    """Return the configuration: the tower has an eleventh of the weights, as in the original."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "hidden_size": 448,
        "num_hidden_layers": 7,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "intermediate_size": 2368,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }
    tower = {
        "hidden_size": 160,
        "depth": 8,
        "num_heads": 4,
        "intermediate_size": 428,
        "out_hidden_size": 448,
        "fullatt_block_indexes": [1, 3, 5, 7],
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = dict(zip(names, (IMAGE, VIDEO, START, END), strict=True))
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)


def batch(prompts: int, samples: int, side: int, response: int) -> Any:
    """Return samples of prompts, each of which shows one image of ``side`` x ``side`` pixels."""
    from verl.protocol import DataProto
    from verl.utils.py_functional import object_array
    from verl.utils.vision.positions import VisionRope

    patches = side // 14
    grid = torch.tensor([[1, patches, patches]])
    ids = torch.tensor([5, START, *[IMAGE] * (patches // 2) ** 2, END, 6])
    rope = VisionRope(IMAGE, VIDEO, merge_size=2, tokens_per_second=2, frames_apart=False)
    shown = rope.positions(torch.cat([ids, torch.full((response,), 7)]), grid, None, None)
    length = len(ids) + response
    rows = [{"pixel_values": torch.randn(patches**2, 1176), "image_grid_thw": grid} for _ in range(prompts)]
    answers = torch.randint(10, 900, (prompts, response))
    tensors = {
        "input_ids": torch.cat([ids.expand(prompts, -1), answers], dim=1),
        "attention_mask": torch.ones(prompts, length, dtype=torch.long),
        "position_ids": torch.cat([torch.arange(length)[None], shown]).expand(prompts, -1, -1),
        "responses": answers,
        "response_mask": torch.ones(prompts, response, dtype=torch.long),
    }
    data = DataProto.from_dict(tensors, {"multi_modal_inputs": object_array(rows)})
    return data.repeat(samples, interleave=True)


def loss_fn(output: Any, rows: Any) -> Any:
    """Return the mean of the log-probabilities as the loss."""
    from verl.algos.aggregate import Sum

    return [Sum(output["log_probs"].sum(), "token")], {}


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the least CPU seconds of several runs, the first of which does not count."""
    found = []
    for _ in range(repeats + 1):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found[1:])


def main() -> None:
    """Print a table."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--side", type=int, nargs="+", default=[224, 448])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoModelForImageTextToText

        AutoModelForImageTextToText.from_config(model_config()).save_pretrained(Path(folder))
        engine = EngineRegistry.new(
            "language_model",
            "fsdp",
            model_config=HFModelConfig(path=folder, load_tokenizer=False, use_remove_padding=True),
            engine_config=FSDPEngineConfig(model_dtype="fp32"),
            optimizer_config=FSDPOptimizerConfig(lr=1e-5),
            checkpoint_config=None,
        )
        engine.initialize()
    print("| image | pass | tower once a sample, CPU s | once a prompt, s | ratio |\n|---|---|---|---|---|")
    for side in args.side:
        shared = batch(args.prompts, args.samples, side, args.response)
        shared.meta_info["micro_batch_size_per_gpu"] = args.samples
        copied = shared.repeat(1)
        rows = copied.non_tensor_batch["multi_modal_inputs"]
        copied.non_tensor_batch["multi_modal_inputs"] = np.array([dict(row) for row in rows], dtype=object)
        for name, mode in (("log-probabilities", engine.eval_mode), ("update", engine.train_mode)):
            found = []
            for data in (copied, shared):
                with mode():
                    run = engine.infer_batch if name != "update" else lambda rows: engine.train_batch(rows, loss_fn)
                    found.append(seconds(lambda data=data, run=run: run(data), args.repeats))
            print(f"| {side} x {side} | {name} | {found[0]:.2f} | {found[1]:.2f} | {found[0] / found[1]:.2f} |")


if __name__ == "__main__":
    main()
