"""RLHFDataset: what an item holds, what is cut or left out, and what each bad row is answered with."""

import copy
import json
import pickle
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir

from examples.tiny_model import CHAT_TEMPLATE
from verl.errors import DataError, PromptTooLongError
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.ppo.loaders import complete_data_node
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn, truncate

USER = "<|user|>{}<|end|><|assistant|>"


def build(tokenizer, files, **config):
    return RLHFDataset(files, tokenizer, {"max_prompt_length": 16, "filter_overlong_prompts": False, **config})


def test_item_holds_every_documented_key(tokenizer, parquet, row):
    first = row("1+1=?", agent_name="tool_agent", weight=0.5)
    second = row("hi", extra_info={"index": None, "split": "x", "tools_kwargs": {"a": 1}})
    dataset = build(tokenizer, parquet([first, second]), return_raw_chat=True, return_full_prompt=True)
    item = dataset[0]
    ids = tokenizer.encode(USER.format("1+1=?"))
    pad = 16 - len(ids)
    assert item["raw_prompt_ids"] == ids
    assert item["input_ids"].tolist() == [tokenizer.pad_token_id] * pad + ids
    assert item["attention_mask"].tolist() == [0] * pad + [1] * len(ids)
    assert item["position_ids"].tolist() == [0] * pad + list(range(len(ids)))
    assert item["raw_prompt"] == [{"role": "user", "content": "1+1=?"}]
    assert item["full_prompts"] == USER.format("1+1=?")
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (7, {}, {})
    assert item["agent_name"] == "tool_agent" and item["weight"] == 0.5 and item["ability"] == "math"
    assert item["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert "prompt" not in item
    assert dataset[1]["index"] == 0 and dataset[-1]["tools_kwargs"] == {"a": 1}
    with pytest.raises(IndexError):
        dataset[2]


def test_extra_info_defaults_to_an_empty_dict(tokenizer, parquet, row):
    item = build(tokenizer, parquet([row(extra_info=None)]))[0]
    assert item["extra_info"] == {} and item["index"] == 0


def test_rows_of_several_files_and_messages_with_other_keys(tokenizer, parquet, row):
    # parquet unites the keys of all messages: one without a name must not get `name: None`
    told = {"role": "tool", "content": "b"}
    named = row(prompt=[{"role": "user", "content": "a", "name": "bob"}, told])
    files = [parquet([row("x")], "a.parquet"), parquet([named], "b.parquet")]
    dataset = build(tokenizer, files, return_raw_chat=True, max_prompt_length=16)
    assert len(dataset) == 2
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "x"}]
    assert dataset[1]["raw_prompt"][1] == told


def test_a_prompt_that_an_assistant_has_begun(tokenizer, parquet, row):
    """A response would be a second turn, unless the template is told to continue the first."""
    begun = row(prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}])
    path = parquet([row("x"), begun])
    with pytest.raises(DataError, match=r"row 1, column 'prompt' .*ends with an assistant's message, .* second turn"):
        build(tokenizer, path)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(DataError, match=r"row 0, column 'prompt' .*ends with a message that is not the assistant's"):
        build(tokenizer, path, apply_chat_template_kwargs=options)
    item = build(tokenizer, parquet([begun]), apply_chat_template_kwargs=options, return_full_prompt=True)[0]
    assert item["full_prompts"] == "<|user|>a<|end|><|assistant|>So"


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", slice(-9, None)), ("right", slice(0, 9)), ("middle", None)],
)
def test_truncation(tokenizer, parquet, row, truncation, kept):
    ids = tokenizer.encode(USER.format("abcdefgh"))
    expected = ids[kept] if kept else ids[:4] + ids[-5:]
    item = build(tokenizer, parquet([row("abcdefgh")]), truncation=truncation, max_prompt_length=9)[0]
    assert item["raw_prompt_ids"] == expected
    assert item["input_ids"].tolist() == expected


def test_truncation_error_names_file_and_row(tokenizer, parquet, row):
    files = [parquet([row("a")], "a.parquet"), parquet([row("b"), row("c" * 40)], "b.parquet")]
    dataset = build(tokenizer, files)
    with pytest.raises(PromptTooLongError, match=r"b\.parquet, row 1, column 'prompt'.*43 tokens.*is 16") as caught:
        dataset[2]
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, RuntimeError)
    with pytest.raises(PromptTooLongError, match="3 tokens are more than 2"):
        truncate([1, 2, 3], 2, "error")


@pytest.mark.parametrize("workers", [1, 2])
def test_filter_keeps_what_fits(tokenizer, parquet, row, workers):
    rng = np.random.default_rng(0)
    contents = ["z" * int(n) for n in rng.integers(1, 25, size=1500)]
    files = [
        parquet([row(c) for c in contents[:700]], "a.parquet"),
        parquet([row(c) for c in contents[700:]], "b.parquet"),
    ]
    dataset = build(
        tokenizer, files, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers, return_full_prompt=True
    )
    fits = [c for c in contents if len(tokenizer.encode(USER.format(c))) <= 16]
    assert 0 < len(fits) < len(contents)
    assert [dataset[i]["full_prompts"] for i in range(len(dataset))] == [USER.format(c) for c in fits]
    last = max(i for i, c in enumerate(contents) if len(tokenizer.encode(USER.format(c))) <= 16)
    assert dataset.where(len(dataset) - 1).endswith(f"b.parquet, row {last - 700}")


VLLM = {"name": "vllm", "mode": "async"}
SGLANG = {"name": "sglang", "multi_turn.enable": True}  # asked by agent loops whatever the mode is


@pytest.mark.parametrize(
    "engine, default, kept",
    [(VLLM, "tool_agent", "be"), (VLLM, "single_turn_agent", "abe"), (SGLANG, "single_turn_agent", "be")],
)
def test_tools_that_a_loop_shows_count_for_the_filter(tokenizer, parquet, row, tmp_path, engine, default, kept):
    tools = tmp_path / "tools.yaml"
    schema = {"type": "function", "function": {"name": "f", "description": "\\${not.a.key}"}}
    tools.write_text(json.dumps({"tools": [{"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "tool_schema": schema}]}))
    changes = engine | {"multi_turn.tool_config_path": tools, "agent.default_agent_loop": default}
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose(
            "ppo_trainer",
            ["data.filter_overlong_prompts=true", "data.max_prompt_length=40"]
            + [f"actor_rollout_ref.rollout.{key}={value}" for key, value in changes.items()],
        )
    complete_data_node(config)
    template = "{% for tool in tools or () %}{{ tool.function.description }}{% endfor %}" + CHAT_TEMPLATE
    config.data.apply_chat_template_kwargs = {"chat_template": template}
    rows = [row("a" * 30), row("b"), row("c" * 60), row("d" * 30, agent_name="tool_agent")]
    rows += [row("e" * 30, agent_name="single_turn_agent")]
    dataset = RLHFDataset(parquet(rows), tokenizer, config.data)
    assert "".join(dataset[i]["raw_prompt"][0]["content"][0] for i in range(len(dataset))) == kept
    config.data.filter_overlong_prompts = False
    complete_data_node(config)
    assert config.data.prompt_tools is None


def test_filter_that_leaves_nothing_is_refused(tokenizer, parquet, row):
    with pytest.raises(DataError, match=r"all 1 prompts are longer than data\.max_prompt_length=3"):
        build(tokenizer, parquet([row("a")]), filter_overlong_prompts=True, max_prompt_length=3)


def test_pickle_drops_the_rows_and_reads_them_again(tokenizer, parquet, row):
    path = parquet([row("a"), row("b" * 40), row("c")])
    dataset = build(tokenizer, path, filter_overlong_prompts=True)
    state = pickle.dumps(dataset)
    assert b"openai/gsm8k" not in state
    restored = pickle.loads(state)
    assert restored[1]["raw_prompt_ids"] == dataset[1]["raw_prompt_ids"] and len(restored) == 2
    restored.resume_dataset_state()
    assert len(restored) == 2


BAD_ROWS = {
    "no prompt column": ({"prompt": None}, r"column 'prompt' \(data\.prompt_key\): is missing; the file has"),
    "prompt is text": ({"prompt": "hello"}, r"row 0, column 'prompt' .*list of messages.*got string"),
    "prompt is a list of text": ({"prompt": ["hello"]}, r"row 0, column 'prompt' .*got a list of string"),
    "prompt is empty": ({"prompt": []}, r"row 2, column 'prompt' .*is empty"),
    "no role": ({"prompt": [{"content": "x"}]}, r"row 2, column 'prompt\.role' .*is null"),
    "no content": ({"prompt": [{"role": "user"}]}, r"row 2, column 'prompt\.content' .*is null"),
    "empty role": ({"prompt": [{"role": "", "content": "x"}]}, r"row 2, column 'prompt\.role' .*empty string"),
    "no ground truth": ({"reward_model": {"style": "rule"}}, r"row 2, column 'reward_model\.ground_truth': is missing"),
    "no reward_model": ({"reward_model": None}, r"row 2, column 'reward_model': is null"),
    "no data source": ({"data_source": None}, r"row 2, column 'data_source' \(data\.reward_fn_key\): is null"),
    "empty data source": ({"data_source": ""}, r"row 2, column 'data_source' .*empty string"),
    "image": ({"images": ["a.png"]}, r"row 2, column 'images' \(data\.image_key\): holds images.*no processor"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row_is_found_at_load(tokenizer, parquet, row, case):
    change, message = BAD_ROWS[case]
    everywhere = message.startswith(r"row 0") or "is missing; the file" in message
    rows = [row(**change) if everywhere or i == 2 else row() for i in range(4)]
    good = parquet([row()], "good.parquet")
    bad = parquet(rows, "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet, " + message) as caught:
        build(tokenizer, [good, bad])
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward_model": "2"}, r"column 'reward_model': must be a dict.*got string"),
        ({"extra_info": "x"}, r"column 'extra_info': must be a dict, got string"),
        ({"data_source": 3}, r"column 'data_source' .*must be a string, got int64"),
        ({"prompt": [{"role": "user", "content": 3}]}, r"column 'prompt\.content' .*must be a string, got int64"),
        ({"images": "a.png"}, r"column 'images' .*must be a list, got string"),
    ],
)
def test_column_of_the_wrong_type(tokenizer, parquet, row, columns, message):
    with pytest.raises(DataError, match=r"train\.parquet, row 0, " + message):
        build(tokenizer, parquet([row(**columns)]))


def test_rows_judged_by_a_model_need_no_ground_truth(tokenizer, parquet, row):
    assert len(build(tokenizer, parquet([row(reward_model={"style": "model"})]))) == 1


def test_bad_files(tokenizer, parquet, row, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet: no such file"):
        build(tokenizer, str(tmp_path / "nowhere.parquet"))
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"text\.parquet: cannot be read as parquet"):
        build(tokenizer, str(tmp_path / "text.parquet"))
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet: has no row"):
        build(tokenizer, str(tmp_path / "empty.parquet"))
    told = row(data_source="a damaged text")
    pq.write_table(pa.Table.from_pylist([told]), tmp_path / "broken.parquet", compression="none", use_dictionary=False)
    content = (tmp_path / "broken.parquet").read_bytes()
    (tmp_path / "broken.parquet").write_bytes(content.replace(b"a damaged text", b"a damaged \x9bext"))
    with pytest.raises(DataError, match=r"broken\.parquet: cannot be read as parquet: .*UTF8"):
        build(tokenizer, str(tmp_path / "broken.parquet"))
    for line, problem in (("{", ", character 2: Expecting"), ("[1]", ": must be an object")):
        (tmp_path / "rows.jsonl").write_text(f'{{"prompt": 1}}\n\n{line}\n')
        with pytest.raises(DataError, match=rf"rows\.jsonl: cannot be read as JSON lines: line 3{problem}"):
            build(tokenizer, str(tmp_path / "rows.jsonl"))
    other = parquet([row(ability={"x": 1})], "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet: its columns do not fit"):
        build(tokenizer, [parquet([row()]), other])
    with pytest.raises(DataError, match=r"data\.train_files"):
        build(tokenizer, [])


def test_bad_settings(tokenizer, parquet, row):
    path = parquet([row()])
    with pytest.raises(DataError, match=r"data\.truncation must be one of .*'center'"):
        build(tokenizer, path, truncation="center")
    with pytest.raises(DataError, match=r"data\.max_prompt_length must be at least 1, got 0"):
        build(tokenizer, path, max_prompt_length=0)
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    with pytest.raises(AssertionError, match="has no chat template"):
        build(bare, path)


def test_template_that_refuses_a_row(tokenizer, parquet, row):
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('starts with user') }}{% endif %}x"
    rows = [row(), row(prompt=[{"role": "system", "content": "s"}])]
    dataset = build(
        tokenizer, parquet(rows), apply_chat_template_kwargs={"chat_template": strict}, filter_overlong_prompts=True
    )
    with pytest.raises(
        DataError, match=r"train\.parquet, row 1, column 'prompt': the chat template rejects it: starts"
    ):
        dataset[1]


def test_checks_of_many_rows_are_fast(tokenizer, row, tmp_path: Path):
    table = pa.Table.from_pylist([row()] * 1000)
    pq.write_table(pa.concat_tables([table] * 200), tmp_path / "large.parquet")
    start = time.process_time()
    dataset = build(tokenizer, str(tmp_path / "large.parquet"))
    assert len(dataset) == 200_000
    assert time.process_time() - start < 5  # row by row it takes minutes for the millions that users have


def test_collate():
    rows = [{"a": torch.tensor([i, i]), "b": [i, i], "c": {"x": i}, "d": "s", "e": np.ones(2)} for i in range(3)]
    batch = collate_fn(rows)
    assert batch["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    for key in "bcde":
        assert batch[key].shape == (3,) and batch[key].dtype == object
        assert all(batch[key][i] is rows[i][key] for i in range(3))
    with pytest.raises(DataError, match="column 'b' is in 1 of the 2 rows"):
        collate_fn([{"a": torch.ones(1), "b": 1}, {"a": torch.ones(1)}])
