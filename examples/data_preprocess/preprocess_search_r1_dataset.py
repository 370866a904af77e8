"""Write the questions of Search-R1 as parquet files for a model that calls a search engine.

Read from the hub or from a folder with the same files; without a network, generate questions:

    python examples/data_preprocess/preprocess_search_r1_dataset.py --local_dir ~/data/searchR1_processed_direct
    python examples/data_preprocess/preprocess_search_r1_dataset.py --local_dataset_path ~/raw/nq_hotpotqa_train
    python examples/data_preprocess/preprocess_search_r1_dataset.py --source synthetic --local_dir ~/data/capitals
"""

import random
import sys
from dataclasses import replace

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, prepare

SYSTEM = "You answer questions, and find the facts that you do not know with a search engine."
INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>, again after each thing that you learn. To search, call "
    "the tool search with your queries: the best results come back. Search as often as you need. Then write only the "
    "answer inside <answer> and </answer>, such as <answer> 1912 </answer>. "
    "Question: "
)
CAPITALS = {"France": "Paris", "Kenya": "Nairobi", "Peru": "Lima", "Japan": "Tokyo"}


def made_up(rng: random.Random) -> Row:
    """Generate a question about a capital, with the columns of the published data set."""
    country = rng.choice(sorted(CAPITALS))
    return {
        "id": f"synthetic_{rng.getrandbits(32):08x}",
        "question": f"What is the capital of {country}?",
        "data_source": "nq",
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [CAPITALS[country]]}},
        "metadata": None,
    }


RAW = RawSet(
    "PeterJinGo/nq_hotpotqa_train",
    ("question", "data_source", "reward_model"),
    made_up,
    has_split_files=True,
)


def row(split: str, example: Row, index: int) -> Row:
    """Return a question as a prompt, and the arguments with which its search tool is created.

    Raises: ValueError for a row without a question or accepted answers.
    """
    question = example["question"]
    truth = (example["reward_model"] or {}).get("ground_truth")
    if not question or truth is None:
        raise ValueError(f"no question or no ground truth: question={question!r}, ground_truth={truth!r}")
    source = f"searchR1_{example['data_source']}"
    create = {"ground_truth": truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": INSTRUCTION + question}],
        "ability": example.get("ability"),
        "reward_model": example["reward_model"],
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create}},
        },
        "metadata": example.get("metadata"),
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    parser = build_parser(__doc__, "searchR1_processed_direct", is_local_dir_deprecated=False)
    parser.add_argument("--hf_repo_id", default=RAW.hub_name, help=f"data set of the hub (default: {RAW.hub_name})")
    args = parser.parse_args()
    return prepare(args, replace(RAW, hub_name=args.hf_repo_id), row)


if __name__ == "__main__":
    sys.exit(main())
