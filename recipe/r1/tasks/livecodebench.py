"""LiveCodeBench: programs that must pass all public and private tests of a problem, run in the local sandbox."""

import base64
import json
import pickle
import random
import zlib
from typing import Any

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet
from verl.utils.loading import unpickle_text
from verl.utils.reward_score import prime_code

from .task import Part, Task

WITH_STARTER = "Complete this code, and give the whole of it in one block:"
WITHOUT_STARTER = (
    "The program reads its input from standard input and writes the answer to standard output. Give all of it in one "
    "block:"
)
COLUMNS = ("question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
MOST_TESTS_BYTES = 1 << 30


def compute_score(model_output: str, ground_truth: str) -> float:
    """Return 1 if the last program of the response passes all tests, else 0.

    Raises: SandboxError if this machine cannot isolate the program.
    """
    return prime_code.compute_score(model_output, ground_truth)[0]


def problem(example: Row, index: int) -> tuple[str, str]:
    """Return the problem with its starter code, and all tests as JSON."""
    starter = example["starter_code"].strip()
    instruction = WITH_STARTER if starter else WITHOUT_STARTER
    code = starter or "# YOUR CODE HERE"
    prompt = f"{example['question_content']}\n\n{instruction}\n```python\n{code}\n```\n"
    tests = json.loads(example["public_test_cases"]) + private_tests(example["private_test_cases"])
    cases = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    function = json.loads(example["metadata"] or "{}").get("func_name")
    return prompt, json.dumps(cases | ({"fn_name": function} if function else {}))


def private_tests(text: str) -> list[dict[str, Any]]:
    """Decode the private tests: plain JSON or, as published, the base64 of the zlib-compressed pickle of JSON text.

    Raises: ValueError for any other format, such as a pickle of anything but text.
    """
    try:
        return _as_tests(json.loads(text))
    except json.JSONDecodeError:
        pass
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), MOST_TESTS_BYTES)
        return _as_tests(json.loads(unpickle_text(packed, "private_test_cases")))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the private tests cannot be read: {error}") from error


def _as_tests(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list):
        raise ValueError(f"the tests must be a list, got {type(found).__name__}")
    return found


def _made_up(rng: random.Random) -> Row:
    factor = rng.randint(2, 9)
    numbers = [rng.randint(1, 99) for _ in range(4)]
    if rng.random() < 0.5:
        tests = [{"input": f"{x}\n", "output": f"{x * factor}\n", "testtype": "stdin"} for x in numbers]
        starter = ""
        metadata = {}
        place = "Read a number and print it"
    else:
        tests = [{"input": str(x), "output": str(x * factor), "testtype": "functional"} for x in numbers]
        starter = "class Solution:\n    def times(self, x: int) -> int:\n        "
        metadata = {"func_name": "times"}
        place = "Return a number"
    hidden = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests[1:])))).decode()
    question = f"{place} times {factor}."
    values = (question, starter, json.dumps(tests[:1]), hidden, json.dumps(metadata))
    return dict(zip(COLUMNS, values, strict=True))


SOURCE = "livecodebench/code_generation_lite"
RAW = RawSet(SOURCE, COLUMNS, _made_up, splits=("test",), hub_files="test*.jsonl")  # each release adds one file
LIVECODEBENCH = Task("code", (Part(SOURCE, RAW),), problem, compute_score)
