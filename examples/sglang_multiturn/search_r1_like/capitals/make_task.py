"""Write a task that a tiny model can only solve with a search: a model with random weights, its data, and a corpus.

    python examples/sglang_multiturn/search_r1_like/capitals/make_task.py --save-dir outputs/search

``corpus.jsonl`` has a document on each of 2,176 countries that do not exist, with its capital. ``data`` asks for
capitals. No country of ``test`` occurs elsewhere in the data, so only the corpus says its capital. Half of the
supervised conversations answer at once, with the right name; the other half search first, and only half of those for
the country of the question. So they teach what a search looks like, and neither when to make one nor reliably of what.
"""

import argparse
import json
import os
import random
import sys
from itertools import product
from typing import Any

import pandas as pd
import torch
from tokenizers import AddedToken
from transformers import Qwen2ForCausalLM

from examples.tiny_model import byte_tokenizer, tiny_config

HEAD, TAIL = '<tool_call>{"name": "search", "arguments": {"query_list": ["', '"]}}</tool_call>'
OPEN, CLOSE = "<answer>", "</answer>"
SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
NUM_TEST = 128
NUM_TRAIN = 2048
NUM_SUPERVISED = 4096
NUM_SUPERVISED_TEST = 64

Row = dict[str, Any]
Fact = tuple[str, str]
"""A country and its capital."""


def write_model(folder: str, seed: int) -> None:
    """Write model and tokenizer, which has a token for each syllable, and for head and tail of calls and answers."""
    tokenizer = byte_tokenizer()
    texts = (HEAD, TAIL, OPEN, CLOSE, *SYLLABLES)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def made_up_facts(draw: random.Random) -> list[Fact]:
    """Return countries with their capitals; no two of all have the same name."""
    count = NUM_TEST + NUM_TRAIN
    names = draw.sample(["".join(pair) for pair in product(SYLLABLES, repeat=2)], 2 * count)
    return list(zip(names[:count], names[count:], strict=True))


def document(number: int, country: str, capital: str) -> Row:
    """Return what the corpus says about a country."""
    return {"id": str(number), "contents": f"{country}\nThe capital is {capital}."}


def shown(country: str, capital: str) -> str:
    """Return the answer of ``SearchTool`` to a query that finds one document."""
    return json.dumps({"result": f"Doc 1 (Title: {country})\nThe capital is {capital}.\n"})


def question(country: str) -> Row:
    """Return the message that asks for a capital."""
    return {"role": "user", "content": f"capital of {country}?"}


def prompt_row(split: str, index: int, country: str, capital: str) -> Row:
    """Return a question with its ground truth."""
    return {
        "data_source": "capitals",
        "prompt": [question(country)],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [capital]}},
        "extra_info": {"split": split, "index": index},
    }


def conversation(number: int, fact: Fact, other: Fact) -> Row:
    """Return a supervised conversation: an answer, or a search for this or for another country and an answer."""
    country, capital = fact
    messages = [question(country)]
    if number % 2:
        country, capital = fact if number % 4 == 1 else other
        call = {"role": "assistant", "content": f"{HEAD}{country}{TAIL}"}
        messages += [call, {"role": "tool", "content": shown(country, capital)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"{OPEN}{capital}{CLOSE}"}]}


def tables(seed: int) -> tuple[list[Row], dict[str, list[Row]]]:
    """Return the corpus, and the rows of each file of data by its name."""
    draw = random.Random(seed)
    facts = made_up_facts(draw)
    splits = {"test": facts[:NUM_TEST], "train": facts[NUM_TEST:]}
    made = {name: [prompt_row(name, i, *fact) for i, fact in enumerate(split)] for name, split in splits.items()}
    count = NUM_SUPERVISED + NUM_SUPERVISED_TEST
    drawn = [draw.choice(splits["train"]) for _ in range(2 * count)]
    talks = [conversation(i, drawn[2 * i], drawn[2 * i + 1]) for i in range(count)]
    corpus = [document(number, *fact) for number, fact in enumerate(facts)]
    return corpus, made | {"sft_train": talks[:NUM_SUPERVISED], "sft_test": talks[NUM_SUPERVISED:]}


def main() -> int:
    """Write model, data and corpus; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and names (default: 0)")
    args = parser.parse_args()
    folder = os.path.expanduser(args.save_dir)
    corpus, rows_of_file = tables(args.seed)
    try:
        os.makedirs(os.path.join(folder, "data"), exist_ok=True)
        pd.DataFrame(corpus).to_json(os.path.join(folder, "corpus.jsonl"), orient="records", lines=True)
        for name, rows in rows_of_file.items():
            pd.DataFrame(rows).to_parquet(os.path.join(folder, "data", f"{name}.parquet"))
        write_model(os.path.join(folder, "model"), args.seed)
    except OSError as error:
        sys.stderr.write(f"error: --save-dir={args.save_dir}: {error}: write another folder\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
