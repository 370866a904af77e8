# ruff: noqa: E501 (a case reads as a row of a table)
"""The table of wrong inputs: what each is, and what the message that it gets must hold."""

import json

import pyarrow as pa

from .wrong_input_commands import COMMANDS
from .wrong_input_files import (
    bad_text,
    checkpoint,
    edited,
    flipped,
    header,
    lines,
    model,
    odd_heads,
    row,
    rows,
    scorer,
    special,
    table,
    twice,
    two_types,
    written,
)
from .wrong_inputs import ABSENT, Case

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
NO_WORKERS = {"trainer.total_training_steps": None, "data.filter_overlong_prompts": True}
"""With these the workers of ``late_runs.py`` start only after the data are read: cases that fail before have none."""


NO_FAILURE = {"reward_model.scoring.max_failed_ratio": 0}
TWO = {"trainer.n_gpus_per_node": 2}

# fmt: off
CONFIG = [
    Case("config", "a key that does not exist", {"trainer.n_gpus": 1}, ("trainer.n_gpus=1: there is no such key; the nearest: trainer.n_gpus_per_node",)),
    Case("config", "an override without a value", {"trainer.total_epochs": ABSENT, "trainer.total_epochs 3": ""}, ("'trainer.total_epochs 3=' cannot be read: write key=value",)),
    Case("config", "a word where a number goes", {f"{ROLLOUT}.n": "abc"}, (f"{ROLLOUT}.n=abc: must be an integer",)),
    Case("config", "no rollout engine", {f"{ROLLOUT}.name": ABSENT}, (f"{ROLLOUT}.name=???: is missing: write vllm, sglang or hf",)),
    Case("config", "an unknown rollout engine", {f"{ROLLOUT}.name": "vlm"}, (f"{ROLLOUT}.name=vlm: must be one of vllm",)),
    Case("config", "both micro-batch keys", {f"{ACTOR}.ppo_micro_batch_size": 8}, (f"{ACTOR}.ppo_micro_batch_size=8: ", "set only ppo_micro_batch_size_per_gpu")),
    Case("config", "neither micro-batch key", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}, (f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: set ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=true",)),
    Case("config", "a mini-batch that does not divide the batch", {f"{ACTOR}.ppo_mini_batch_size": 3}, (f"{ACTOR}.ppo_mini_batch_size=3: must divide data.train_batch_size=8",)),
    Case("config", "tensor parallelism that does not divide the workers", TWO | {f"{ROLLOUT}.tensor_model_parallel_size": 4}, (f"{ROLLOUT}.tensor_model_parallel_size=4: ", "must divide the 2 workers", "write one of [1, 2]")),
    Case("config", "Ulysses without padding removal", TWO | {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{MODEL}.use_remove_padding": False}, (f"{ACTOR}.ulysses_sequence_parallel_size=2: ", "use_remove_padding")),
    Case("config", "servers of an engine that has none", {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.name": "hf"}, (f"{ROLLOUT}.mode=async: has no server with name=hf: write sync, or name=vllm",)),
    Case("config", "an agent loop that nobody knows", {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.default_agent_loop": "single_turn"}, (f"{ROLLOUT}.agent.default_agent_loop=single_turn: is no agent loop: write one of single_turn_agent",)),
    Case("config", "a file of agent loops that does not exist", {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.agent_loop_config_path": "/nowhere/loops.yaml"}, (f"{ROLLOUT}.agent.agent_loop_config_path=/nowhere/loops.yaml", "write a file of agent loops")),
    Case("config", "agent loops without a class", written("loops.yaml", b"- name: mine\n", f"{ROLLOUT}.agent.agent_loop_config_path", {f"{ROLLOUT}.mode": "async"}), ("{at}/loops.yaml, item 0: has no name or no _target_: write a list",)),
    Case("config", "a tool file with a misspelled key", written("tools.yaml", b"tools:\n- clas_name: verl.tools.gsm8k_tool.Gsm8kTool\n", f"{ROLLOUT}.multi_turn.tool_config_path", {f"{ROLLOUT}.mode": "async"}), ("{at}/tools.yaml, tools[0]: the key 'clas_name' is unknown: write class_name",)),
    Case("config", "a tool without a description", written("tools.yaml", b"tools:\n- class_name: verl.tools.gsm8k_tool.Gsm8kTool\n  tool_schema: {type: function, function: {name: score}}\n", f"{ROLLOUT}.multi_turn.tool_config_path", {f"{ROLLOUT}.mode": "async"}), ("{at}/tools.yaml, tools[0].tool_schema.function.description: Field required", "write a function as OpenAI describes it")),
    Case("config", "a tool on a server that no file names", written("tools.yaml", b"tools:\n- class_name: verl.tools.mcp_base_tool.MCPBaseTool\n  config: {type: mcp}\n", f"{ROLLOUT}.multi_turn.tool_config_path", {f"{ROLLOUT}.mode": "async"}), ("{at}/tools.yaml, tools[0].mcp: has no mcp_servers_config_path: write mcp:",)),
    Case("config", "two interactions of one name", written("users.yaml", b"interaction:\n- class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n- class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n", f"{ROLLOUT}.multi_turn.interaction_config_path", {f"{ROLLOUT}.mode": "async"}), ("{at}/users.yaml, interaction[1].name=gsm8k: Duplicate interaction name 'gsm8k': write one that is free",)),
    Case("config", "a key that was replaced", {f"+{ACTOR}.tis_imp_ratio_cap": 2}, (f"{ACTOR}.tis_imp_ratio_cap=2: was replaced", "algorithm.rollout_is_threshold")),
    Case("config", "importance weights without the engine's log-probabilities", {"algorithm.rollout_is_threshold": 2.0, f"{ROLLOUT}.calculate_log_probs": False}, (f"{ROLLOUT}.calculate_log_probs=false: must be true with algorithm.rollout_is_threshold=2.0", "write true")),
    Case("config", "a misspelled advantage estimator", {"algorithm.adv_estimator": "grop"}, ("algorithm.adv_estimator=grop: Unknown advantage estimator: it is not registered; the nearest: grpo",)),
    Case("config", "a misspelled loss aggregation", {f"{ACTOR}.loss_agg_mode": "token_mean"}, (f"{ACTOR}.loss_agg_mode=token_mean: Invalid loss_agg_mode: must be one of token-mean",)),
    Case("config", "a negative learning rate", {f"{ACTOR}.optim.lr": -1}, (f"{ACTOR}.optim.lr=-1: must be",)),
    Case("config", "training at temperature 0", {f"{ROLLOUT}.temperature": 0}, (f"{ROLLOUT}.temperature=0: must be above 0", "val_kwargs.do_sample")),
    Case("config", "an unknown tracker", {"trainer.logger": "[console,wandbb]"}, ("trainer.logger=[console,wandbb]: must be a list of trackers",)),
    Case("config", "a tracker that is not installed", {"trainer.logger": "[console,clearml]"}, ("trainer.logger", "clearml", "not installed", "[console]")),
    Case("config", "training on GPUs without one", {"trainer.device": "cuda"}, ("trainer.device=cuda", "no GPU", "write cpu")),
    Case("config", "training on Ascend devices without their package", {"trainer.device": "npu"}, ("trainer.device=npu: needs the package torch_npu", "write cuda or cpu")),
    Case("config", "Megatron-Core on Ascend devices", {"--config-name": "ppo_megatron_trainer", "trainer.device": "npu"}, (f"{ACTOR}.strategy=megatron: is not supported with trainer.device=npu", "--config-name=ppo_trainer")),
    Case("config", "more workers than cores", {"trainer.n_gpus_per_node": 512, "data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 512, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}, ("trainer.n_gpus_per_node=512", "cores", "ray_kwargs.ray_init.num_cpus")),
    Case("config", "a pass of the engine with fewer tokens than sequences", {f"{ROLLOUT}.max_num_batched_tokens": 64, f"{ROLLOUT}.max_num_seqs": 128, f"{ROLLOUT}.name": "vllm"}, (f"{ROLLOUT}.max_num_batched_tokens=64: must be at least max_num_seqs=128",)),
    Case("config", "a pass of the engine below the context without chunks", {f"{ROLLOUT}.max_num_batched_tokens": 8, f"{ROLLOUT}.enable_chunked_prefill": False, f"{ROLLOUT}.name": "vllm"}, (f"{ROLLOUT}.max_num_batched_tokens=8: must be at least the", "enable_chunked_prefill=true")),
    Case("config", "several mistakes at once", {"data.truncation": "cut", "trainer.resume_mode": "always"}, ("2 problems:", "data.truncation=cut: must be one of error, left, right, middle", "trainer.resume_mode=always: must be one of auto")),
]

NUMBERS = {
    f"{ACTOR}.optim.lr": ("inf", 1e10, "nan"),
    f"{ACTOR}.optim.weight_decay": ("inf",),
    f"{ACTOR}.optim.betas": ("[0.9,.inf]",),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": (2,),
    f"{ACTOR}.grad_clip": (0, "inf"),
    f"{ACTOR}.entropy_coeff": ("nan", "inf"),
    f"{ACTOR}.kl_loss_coef": ("inf",),
    f"{ACTOR}.clip_ratio": (-0.2, "inf"),
    f"{ACTOR}.ppo_epochs": (0, 10**9),
    f"{ACTOR}.ppo_mini_batch_size": (0, 1.5),
    f"{ROLLOUT}.temperature": (1e-30, -1, "inf", 3),
    f"{ROLLOUT}.top_p": (0, 1.5),
    f"{ROLLOUT}.top_k": (-2,),
    f"{ROLLOUT}.n": (0, 10**9),
    f"{ROLLOUT}.seed": (-1, 2**32),
    f"{ROLLOUT}.val_kwargs.n": (10**9,),
    f"{ROLLOUT}.val_kwargs.temperature": (1e-30,),
    f"{ROLLOUT}.gpu_memory_utilization": (2,),
    f"{ROLLOUT}.max_num_seqs": (10**9,),
    f"{ROLLOUT}.max_num_batched_tokens": (10**12,),
    f"{ROLLOUT}.update_weights_bucket_megabytes": (0,),
    f"{MODEL}.lora_rank": (-1, 10**9),
    "actor_rollout_ref.nccl_timeout": ("inf", 0),
    "algorithm.gamma": (1.5,),
    "algorithm.lam": (-0.1,),
    "data.train_batch_size": (0,),
    "data.seed": (2**70,),
    "data.dataloader_num_workers": (-1, 10**9),
    "reward_model.scoring.timeout_s": ("inf",),
    "reward_model.scoring.max_failed_ratio": (2,),
    "reward_model.scoring.failure_score": ("nan", "inf"),
    "trainer.seed": (2**70, -(2**70), "one"),
    "trainer.total_epochs": (0, 1.5),
    "trainer.total_training_steps": (0,),
    "trainer.save_freq": (2**70,),
    "trainer.worker_call_timeout_s": ("inf",),
    "trainer.log_val_generations": (-1,),
    "trainer.nnodes": (0,),
    "trainer.critic_warmup": (-1,),
}
"""Numbers out of range: the message repeats key and value."""

CONFIG += [
    Case("config", f"{key.removeprefix('actor_rollout_ref.')}={value}", {key: value}, (f"{key}={value}", "must be"))
    for key, values in NUMBERS.items()
    for value in values
]
CONFIG += [
    Case("config", "no such configuration", {"--config-name": "mine"}, ("--config-name=mine",)),
    Case("config", "a folder of configurations that does not exist", {"--config-dir": "/nowhere"}, ("--config-dir=/nowhere: no such folder",)),
    Case("config", "an override with an open bracket", {"trainer.logger": "[console"}, ("trainer.logger=[console",)),
    Case("config", "a key without a value at its end", {"trainer.total_epochs": ABSENT, "=3": ""}, ("'=3='",)),
    Case("config", "a number instead of a node", {"trainer": 7}, ("trainer",)),
    Case("config", "null instead of a node", {"data": None}, ("data=null: must be a mapping",)),
    Case("config", "a deleted node", {"~trainer": ""}, ("trainer",)),
    Case("config", "an interpolation of a key that does not exist", {"trainer.experiment_name": "${nope}"}, ("trainer.experiment_name", "nope")),
    Case("config", "an environment variable that is not set", {"trainer.experiment_name": "${oc.env:NOPE}"}, ("trainer.experiment_name", "NOPE")),
    Case("config", "an interpolation of itself", {"trainer.experiment_name": "${trainer.experiment_name}"}, ("trainer.experiment_name",)),
    Case("config", "text instead of a switch", {"data.shuffle": "maybe"}, ("data.shuffle=maybe: must be true or false",)),
    Case("config", "a list instead of a name", {"trainer.project_name": "[a]"}, ("trainer.project_name=[a]: must be a string",)),
    Case("config", "an empty name", {"trainer.experiment_name": "''"}, ("trainer.experiment_name",)),
    Case("config", "a mapping instead of trackers", {"trainer.logger": "{a: 1}"}, ("trainer.logger",)),
    Case("config", "a class that does not exist", {f"{ROLLOUT}._target_": "no.such.Class"}, (f"{ROLLOUT}._target_=no.such.Class",)),
    Case("config", "a class of a module that raises", written("mine.py", b"1 / 0\n", f"{ROLLOUT}._target_", {f"{ROLLOUT}._target_": "mine.Config"}), (f"{ROLLOUT}._target_=mine.Config", "ZeroDivisionError")),
    Case("config", "an address of Ray without a port", {"+ray_kwargs.ray_init.address": "head"}, ("ray_kwargs.ray_init.address=head: must be HOST:PORT",)),
    Case("config", "an unknown profiler", {"global_profiler.tool": "perf"}, ("profiler.tool=perf: must be",)),
    Case("config", "an unknown device", {"trainer.device": "tpu"}, ("trainer.device=tpu: must be one of cuda",)),
    Case("config", "an unknown strategy", {f"{ACTOR}.strategy": "ddp"}, (f"{ACTOR}.strategy=ddp",)),
    Case("config", "an unknown schedule", {f"{ACTOR}.optim.lr_scheduler_type": "linear"}, (f"{ACTOR}.optim.lr_scheduler_type=linear: must be",)),
    Case("config", "an unknown KL", {f"{ACTOR}.kl_loss_type": "k9", f"{ACTOR}.use_kl_loss": True}, (f"{ACTOR}.kl_loss_type=k9",)),
    Case("config", "a folder of the rollouts that is a file", written("mine", b"x", "trainer.rollout_data_dir"), ("trainer.rollout_data_dir={at}/mine: must be a folder",)),
    Case("config", "twenty mistakes", {f"trainer.wrong_{i}": i for i in range(20)}, ("20 problems:", "trainer.wrong_0=0")),
    Case("config", "a very long value", {"trainer.device": "x" * 5000}, ("trainer.device=xxx", "must be one of")),
]

TRAIN = "data.train_files"
VAL = "data.val_files"
MESSAGE = {"role": "user", "content": "1 + 1"}

DATA = [
    Case("data", "a file that does not exist", {TRAIN: "/nowhere/train.parquet"}, (f"{TRAIN}=/nowhere/train.parquet: no such file", "examples/data_preprocess")),
    Case("data", "a folder instead of a file", lambda at: {TRAIN: at.folder}, (f"{TRAIN}={{at}}: is a folder: write the parquet file in it",)),
    Case("data", "an empty file", written("train.parquet", b"", TRAIN), (f"{TRAIN}={{at}}/train.parquet: is empty",)),
    Case("data", "a text file", written("train.parquet", b"prompt,answer\n1 + 1,2\n", TRAIN), (f"{TRAIN}={{at}}/train.parquet: cannot be read as parquet",)),
    Case("data", "a truncated file", rows(cut=100), (f"{TRAIN}={{at}}/train.parquet: cannot be read as parquet",)),
    Case("data", "no row", rows(count=0), ("{at}/train.parquet: has no row",)),
    Case("data", "fewer rows than a batch", rows(count=7), (f"{TRAIN}: 7 rows in all, fewer than data.train_batch_size=8",)),
    Case("data", "no prompt column", rows(drop="prompt"), ("train.parquet: has no column 'prompt', it has",)),
    Case("data", "a string as prompt", rows(all_rows={"prompt": "1 + 1 ="}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages such as",)),
    Case("data", "messages without a role", rows(all_rows={"prompt": [{"content": "1 + 1"}]}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): its messages lack 'role'",)),
    Case("data", "a prompt without a message", rows({5: {"prompt": []}}), ("{at}/train.parquet, row 5, column 'prompt' (data.prompt_key): is empty",)),
    Case("data", "a message without text", rows({3: {"prompt": [{"role": "user", "content": None}]}}), ("{at}/train.parquet, row 3, column 'prompt.content' (data.prompt_key): is null",)),
    Case("data", "numbers as messages", rows(all_rows={"prompt": [{"role": "user", "content": 7}]}), ("{at}/train.parquet, row 0, column 'prompt.content' (data.prompt_key): must be a string, got int64",)),
    Case("data", "no reward_model column", rows(drop="reward_model"), ("{at}/train.parquet, column 'reward_model': is missing; the file has ['data_source', 'extra_info', 'prompt']",)),
    Case("data", "a row without ground truth", rows({6: {"reward_model": {"style": "rule", "ground_truth": None}}}), ("{at}/train.parquet, row 6, column 'reward_model.ground_truth': is missing",)),
    Case("data", "no data_source column", rows(drop="data_source"), ("{at}/train.parquet, column 'data_source' (data.reward_fn_key): is missing",)),
    Case("data", "a row without data_source", rows({2: {"data_source": None}}), ("{at}/train.parquet, row 2, column 'data_source' (data.reward_fn_key): is null",)),
    Case("data", "a data_source that no scorer knows", {"custom_reward_function.path": None}, ("train.parquet, row 0, column 'data_source' (data.reward_fn_key)", "'letters'", "openai/gsm8k", "custom_reward_function.path")),
    Case("data", "a bad row among the validation rows", rows({1: {"prompt": []}}, key="data.val_files"), ("{at}/train.parquet, row 1, column 'prompt' (data.prompt_key): is empty",)),
    Case("data", "a custom data set without a file", {"data.custom_cls.path": "/nowhere/mine.py", "data.custom_cls.name": "Mine"}, ("data.custom_cls.path=/nowhere/mine.py: no such file",)),
    Case("data", "a custom data set without a name", written("mine.py", b"class Mine: pass\n", "data.custom_cls.path"), ("data.custom_cls.name=null: is missing: name the class in {at}/mine.py",)),
    Case("data", "a custom data set that is not in its file", written("mine.py", b"class Mine: pass\n", "data.custom_cls.path", {"data.custom_cls.name": "Yours"}), ("data.custom_cls.name=Yours: {at}/mine.py does not define it; it defines Mine",)),
    Case("data", "a custom data set of the wrong base class", written("mine.py", b"class Mine: pass\n", "data.custom_cls.path", {"data.custom_cls.name": "Mine", **NO_WORKERS}), ("data.custom_cls.name='Mine' in '{at}/mine.py' must be a class derived from Dataset",), late="alone"),
    Case("data", "a custom data set that cannot be imported", written("mine.py", b"import no_such_module\nclass Mine: pass\n", "data.custom_cls.path", {"data.custom_cls.name": "Mine", **NO_WORKERS}), ("data.custom_cls.path='{at}/mine.py'", "No module named 'no_such_module'"), late="alone"),
    Case("data", "a custom data set without parameters", written("mine.py", b"from torch.utils.data import Dataset\nclass Mine(Dataset):\n    def __init__(self): pass\n", "data.custom_cls.path", {"data.custom_cls.name": "Mine", **NO_WORKERS}), ("data.custom_cls.name='Mine' in '{at}/mine.py'", "data_files"), late="alone"),
    Case("data", "a sampler of the wrong base class", written("s.py", b"class S: pass\n", "data.sampler.class_path", {"data.sampler.class_name": "S", **NO_WORKERS}), ("data.sampler.class_name='S' in '{at}/s.py' must be a class derived from AbstractSampler",), late="alone"),
    Case("data", "no prompt that fits", {"data.max_prompt_length": 8, **NO_WORKERS}, ("train.parquet", "all 64 prompts are longer than data.max_prompt_length=8: raise it"), late="alone"),
    Case("data", "a prompt that is too long", rows({4: row(4, "very " * 20)}, extra={"data.shuffle": False}), ("{at}/train.parquet, row 4, column 'prompt': the prompt has 103 tokens, data.max_prompt_length is 48: raise it, or set data.truncation to left, right or middle",), late="together"),
]

DATA += [
    *(Case("data", f"a {kind} instead of a file", special(kind, key), (f"{key}={{at}}/odd.parquet: is {what}",)) for kind, key, what in (
        ("pipe", TRAIN, "a named pipe"), ("socket", TRAIN, "a socket"), ("loop", TRAIN, "a link that leads back to itself"), ("dangling", TRAIN, "a link to {at}/gone"))),
    Case("data", "a file on HDFS without its command", {TRAIN: "hdfs://data/train.parquet"}, (f"{TRAIN}=hdfs://data/train.parquet: HDFS paths need the `hdfs` command",)),
    Case("data", "a device instead of a file", {TRAIN: "/dev/zero"}, (f"{TRAIN}=/dev/zero: is a device",)),
    Case("data", "a pipe among the validation files", special("pipe", VAL), (f"{VAL}={{at}}/odd.parquet: is a named pipe",)),
    Case("data", "the terminal instead of a file", {VAL: "/dev/tty"}, (f"{VAL}=/dev/tty: ",)),
    Case("data", "a file below a file", lambda at: {TRAIN: f"{at.workspace.folder}/train.parquet/train.parquet"}, (f"{TRAIN}=", "train.parquet/train.parquet")),
    Case("data", "a name of 300 characters", {TRAIN: "/tmp/" + "x" * 300}, (f"{TRAIN}=/tmp/xxx",)),
    Case("data", "an empty path", {TRAIN: "''"}, (f"{TRAIN}='': ",)),
    Case("data", "no file at all", {TRAIN: "[]"}, (f"{TRAIN}=[]: must be a path",)),
    Case("data", "a number among the files", {TRAIN: "[7]"}, (f"{TRAIN}=[7]: must be",)),
    Case("data", "a list whose second file does not exist", lambda at: {TRAIN: f"[{at.workspace.folder}/train.parquet,/nowhere/b.parquet]"}, ("/nowhere/b.parquet: no such file",)),
    Case("data", "validation without a file", {VAL: None}, (f"{VAL}=null: ", "trainer.test_freq")),
    Case("data", "two columns of prompts", twice("prompt"), ("{at}/train.parquet: has 2 columns named 'prompt'",)),
    Case("data", "two columns of data sources", twice("data_source"), ("{at}/train.parquet: has 2 columns named 'data_source'",)),
    Case("data", "a column that nobody reads, twice", twice("extra_info"), ("{at}/train.parquet: has 2 columns named 'extra_info'",)),
    Case("data", "a zip archive", written("train.parquet", b"PK\x03\x04" + bytes(200), TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a compressed file", written("train.parquet", b"\x1f\x8b\x08" + bytes(200), TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a pointer of git-lfs", written("train.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a page of HTML", written("train.parquet", b"<!DOCTYPE html><html>401</html>", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "an arrow file", written("train.parquet", b"ARROW1\0\0" + bytes(64) + b"ARROW1", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "only the marks of parquet", written("train.parquet", b"PAR1\x00\x00\x00\x00PAR1", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a footer of four gigabytes", written("train.parquet", b"PAR1" + bytes(64) + b"\xff\xff\xff\xffPAR1", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a whole footer over damaged pages", flipped(), ("{at}/train.parquet: cannot be read as parquet after row 0",)),
    Case("data", "garbage in a file of JSON lines", lines("nonsense"), ("{at}/train.jsonl: cannot be read as JSON lines",)),
    Case("data", "a cut line of JSON", lines('{"data_source": "letters", "pro'), ("{at}/train.jsonl: cannot be read as JSON lines",)),
    Case("data", "lines of JSON of two types", lines('{"prompt": 7, "data_source": "letters"}'), ("{at}/train.jsonl: cannot be read as JSON lines",)),
    Case("data", "a list of JSON", written("train.json", json.dumps([row(0), row(1)]).encode(), TRAIN), ("{at}/train.json: cannot be read as JSON lines",)),
    Case("data", "JSON lines in UTF-16", written("train.jsonl", "\n".join(json.dumps(row(i)) for i in range(16)).encode("utf-16"), TRAIN), ("{at}/train.jsonl: cannot be read as JSON lines",)),
    Case("data", "JSON lines without a prompt", written("train.jsonl", b'{"question": "1 + 1"}\n' * 16, TRAIN), (f"{TRAIN}={{at}}/train.jsonl: has no column 'prompt'",)),
    Case("data", "a bad row in JSON lines", lines(json.dumps(row(16) | {"prompt": []})), ("{at}/train.jsonl, row 16, column 'prompt' (data.prompt_key): is empty",)),
    Case("data", "an empty file of JSON lines", written("train.jsonl", b"\n\n", TRAIN), ("{at}/train.jsonl: ",)),
    Case("data", "numbers as prompts", table({"prompt": pa.array([7] * 16)}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages",)),
    Case("data", "nulls as prompts", table({"prompt": pa.nulls(16)}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages",)),
    Case("data", "a message that is not in a list", table({"prompt": [MESSAGE] * 16}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages",)),
    Case("data", "lists of strings as prompts", table({"prompt": [["1 + 1"]] * 16}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages",)),
    Case("data", "a null among the messages", table({"prompt": [[MESSAGE]] * 15 + [[MESSAGE, None]]}), ("{at}/train.parquet, row 15, column 'prompt' (data.prompt_key): holds a null message",)),
    Case("data", "a null prompt", table({"prompt": [[MESSAGE]] * 9 + [None] + [[MESSAGE]] * 6}), ("{at}/train.parquet, row 9, column 'prompt' (data.prompt_key): is null",)),
    Case("data", "a number as role", table({"prompt": [[{"role": 1, "content": "a"}]] * 16}), ("{at}/train.parquet, row 0, column 'prompt.role' (data.prompt_key): must be a string",)),
    Case("data", "an empty role", table({"prompt": [[MESSAGE]] * 4 + [[{"role": "", "content": "a"}]] + [[MESSAGE]] * 11}), ("{at}/train.parquet, row 4, column 'prompt.role' (data.prompt_key): is an empty string",)),
    Case("data", "parts of a message for a text model", table({"prompt": [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]] * 16}), ("{at}/train.parquet, row 0, column 'prompt.content' (data.prompt_key): must be a string",)),
    Case("data", "images for a text model", table({"images": [[]] * 3 + [["a.png"]] + [[]] * 12}), ("{at}/train.parquet, row 3, column 'images' (data.image_key): holds images or videos",)),
    Case("data", "text as images", table({"images": ["a.png"] * 16}), ("{at}/train.parquet, row 0, column 'images' (data.image_key): must be a list",)),
    Case("data", "text as ground truth of a row", table({"reward_model": ["42"] * 16}), ("{at}/train.parquet, row 0, column 'reward_model': must be a dict",)),
    Case("data", "a null reward_model", table({"reward_model": [{"style": "rule", "ground_truth": "a"}] * 5 + [None] * 11}), ("{at}/train.parquet, row 5, column 'reward_model': is null",)),
    Case("data", "reward_model without ground_truth", table({"reward_model": [{"style": "rule"}] * 16}), ("{at}/train.parquet, row 0, column 'reward_model.ground_truth': is missing",)),
    Case("data", "a number as the style of a reward_model", table({"reward_model": [{"style": 1, "ground_truth": "a"}] * 16}), ("{at}/train.parquet, row 0, column 'reward_model.style': must be a string",)),
    Case("data", "a number as data_source", table({"data_source": [7] * 16}), ("{at}/train.parquet, row 0, column 'data_source' (data.reward_fn_key): must be a string",)),
    Case("data", "an empty data_source", table({"data_source": ["letters"] * 8 + [""] * 8}), ("{at}/train.parquet, row 8, column 'data_source' (data.reward_fn_key): is an empty string",)),
    Case("data", "text as extra_info", table({"extra_info": ["a"] * 16}), ("{at}/train.parquet, row 0, column 'extra_info': must be a dict",)),
    Case("data", "a number as ground truth among the validation rows", table({"reward_model": [3] * 16}, key=VAL), ("{at}/train.parquet, row 0, column 'reward_model': must be a dict",)),
    Case("data", "a prompt_key that no file has", {"data.prompt_key": "question"}, ("has no column 'question', it has",)),
    Case("data", "a reward_fn_key that no file has", {"data.reward_fn_key": "source"}, ("column 'source' (data.reward_fn_key): is missing",)),
    Case("data", "an image_key that no file has", {"data.image_key": "photos"}, ("data.image_key=photos: no data file has this column",)),
    Case("data", "an empty prompt_key", {"data.prompt_key": "''"}, ("data.prompt_key='': must be",)),
    Case("data", "text that is not UTF-8", table({"data_source": bad_text(16)}), ("{at}/train.parquet, row 0, column 'data_source' (data.reward_fn_key): holds text that is not UTF-8",)),
    Case("data", "bytes as text of a message", table({"prompt": [[{"role": "user", "content": b"a"}]] * 16}), ("{at}/train.parquet, row 0, column 'prompt.content' (data.prompt_key): must be a string, got binary",)),
    Case("data", "maps as messages", table({"prompt": pa.array([[[("role", "user"), ("content", "a")]]] * 16, pa.list_(pa.map_(pa.string(), pa.string())))}), ("{at}/train.parquet, row 0, column 'prompt' (data.prompt_key): must be a list of messages",)),
    Case("data", "two files whose columns differ in type", two_types, ("{at}/b.parquet: its columns do not fit those of {at}/train.parquet",)),
    Case("data", "dates as data_source", table({"data_source": pa.array([1] * 16, pa.timestamp("ms"))}), ("{at}/train.parquet, row 0, column 'data_source' (data.reward_fn_key): must be a string, got timestamp[ms]",)),
    Case("data", "lists as reward_model", table({"reward_model": [[1]] * 16}), ("{at}/train.parquet, row 0, column 'reward_model': must be a dict",)),
    Case("data", "a table of text by its name", written("train.csv", b"prompt,answer\n1,2\n", TRAIN), (f"{TRAIN}={{at}}/train.csv: cannot be read as parquet",)),
    Case("data", "an encrypted file", written("train.parquet", b"PARE" + bytes(100) + b"\x10\0\0\0PARE", TRAIN), ("{at}/train.parquet: cannot be read as parquet",)),
    Case("data", "a pattern of names", {TRAIN: "/nowhere/*.parquet"}, (f"{TRAIN}=/nowhere/*.parquet: no such file",)),
    Case("data", "a chat template of the data with an error", {"+data.apply_chat_template_kwargs.chat_template": "'{% for m in messages %}'"}, ("data.apply_chat_template_kwargs.chat_template: the chat template is not valid Jinja, line 1",)),
    Case("data", "a custom data set that is a pipe", special("pipe", "data.custom_cls.path", {"data.custom_cls.name": "Mine"}), ("data.custom_cls.path={at}/odd.parquet: is a named pipe",)),
    Case("data", "a custom data set that is a folder", lambda at: {"data.custom_cls.path": at.folder, "data.custom_cls.name": "Mine"}, ("data.custom_cls.path={at}: is a folder",)),
    Case("data", "a custom data set with a syntax error", written("mine.py", b"class Mine(:\n", "data.custom_cls.path", {"data.custom_cls.name": "Mine"}), ("data.custom_cls.path={at}/mine.py: is not valid Python",)),
    Case("data", "a custom data set without a path", {"data.custom_cls.name": "Mine"}, ("data.custom_cls.path=null: is missing",)),
    Case("data", "a sampler without a file", {"data.sampler.class_path": "/nowhere/s.py", "data.sampler.class_name": "S"}, ("data.sampler.class_path=/nowhere/s.py: no such file",)),
    Case("data", "a sampler next to loader processes", written("s.py", b"class S: pass\n", "data.sampler.class_path", {"data.sampler.class_name": "S", "data.dataloader_num_workers": 2}), ("data.dataloader_num_workers=2: must be 0",)),
    Case("data", "a generator of data without a name", written("g.py", b"class G: pass\n", "data.datagen.path"), ("data.datagen.name=null: is missing",)),
]

PATH, NAME = "custom_reward_function.path", "custom_reward_function.name"
CALL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"

REWARD = [
    Case("reward", "a file that does not exist", {PATH: "/nowhere/reward.py"}, (f"{PATH}=/nowhere/reward.py: no such file",)),
    Case("reward", "a syntax error", scorer("def compute_score(:\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python", "(reward.py, line 1)")),
    Case("reward", "a function that is not in the file", scorer("return 0", extra={NAME: "my_score"}), (f"{NAME}=my_score: {{at}}/reward.py does not define it; it defines compute_score",)),
    Case("reward", "a number instead of a function", scorer("compute_score = 1\n", whole=True), (NAME, "compute_score", "must be a function")),
    Case("reward", "too few parameters", scorer("def compute_score(data_source, solution_str):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "compute_score(data_source, solution_str)", "ground_truth")),
    Case("reward", "a parameter that nobody passes", scorer("def compute_score(data_source, solution_str, ground_truth, extra_info, tolerance):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "tolerance", "custom_reward_function.reward_kwargs")),
    Case("reward", "an argument that it does not take", scorer("return 0", extra={"+custom_reward_function.reward_kwargs.bonus": 1}), (f"{NAME}=compute_score: ", "bonus")),
    Case("reward", "an asynchronous function", scorer("async def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "asynchronous", "`def`")),
    Case("reward", "an unknown reward manager", {"reward_model.reward_manager": "naiv"}, ("reward_model.reward_manager=naiv: Unknown reward manager: it is not registered; the nearest: naive",)),
    Case("reward", "an argument that the manager does not take", {"reward_model.reward_manager": "dapo", "+reward_model.reward_kwargs.max_len": 16}, ("reward_model.reward_kwargs.max_len=16: is not taken by the reward manager 'dapo': write max_resp_len or overlong_buffer_cfg",)),
    Case("reward", "no time to score", {"reward_model.scoring.timeout_s": 0}, ("reward_model.scoring.timeout_s=0: must be a number in (0, 100000000]",)),
    Case("reward", "an invalid sandbox address", {"reward_model.sandbox_fusion.url": "sandbox:8080"}, ("reward_model.sandbox_fusion.url=sandbox:8080: must be null or an address such as http://host:8080/run_code",)),
    Case("reward", "a module that cannot be imported", scorer("import no_such_module\ndef compute_score(data_source, solution_str, ground_truth, extra_info): return 0\n", whole=True, extra=NO_WORKERS), (PATH, "{at}/reward.py", "No module named 'no_such_module'"), late="alone"),
    Case("reward", "a module that ends its process", scorer("raise SystemExit('no key')\n" + CALL + "    return 1\n", whole=True, extra=NO_WORKERS), (PATH, "{at}/reward.py", "SystemExit: no key"), late="alone"),
    Case("reward", "an installed module that is not there", {PATH: "pkg://no_such_module", **NO_WORKERS}, (f"{PATH}='pkg://no_such_module'", "No module named 'no_such_module'"), late="alone"),
    Case("reward", "raises", scorer("return 1 / 0", extra=NO_FAILURE), ("data_source 'letters', sample ", "ground truth 'letters'", "the scorer raised ZeroDivisionError: division by zero"), late="together"),
    Case("reward", "returns None", scorer("pass", extra=NO_FAILURE), ("the scorer returned None; a scorer must return a number",), late="together"),
    Case("reward", "returns NaN", scorer("return float('nan')", extra=NO_FAILURE), ("the scorer returned nan, which is not finite",), late="together"),
    Case("reward", "returns a string", scorer("return '1'", extra=NO_FAILURE), ("the scorer returned '1'; a scorer must return a number",), late="together"),
    Case("reward", "returns a dict without a score", scorer("return {'acc': 1.0}", extra=NO_FAILURE), ("the scorer returned a dict without 'score': {'acc': 1.0}",), late="together"),
    Case("reward", "returns a list", scorer("return [1.0]", extra=NO_FAILURE), ("the scorer returned [1.0]; a scorer must return a number",), late="together"),
]

REWARD += [
    Case("reward", "a folder", lambda at: {PATH: at.folder}, (f"{PATH}={{at}}: is a folder",)),
    *(Case("reward", f"a {kind} instead of a file", special(kind, PATH), (f"{PATH}={{at}}/odd.parquet: is a",)) for kind in ("pipe", "socket", "loop", "dangling")),
    Case("reward", "a device", {PATH: "/dev/zero"}, (f"{PATH}=/dev/zero: is a device",)),
    Case("reward", "a file of bytes", written("reward.py", bytes(range(256)), PATH), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "a file with null bytes", written("reward.py", b"x = 1\0\n", PATH), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "a file in UTF-16", written("reward.py", f"{CALL}    return 1\n".encode("utf-16"), PATH), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "a file that is not named as Python", written("reward.txt", f"{CALL}    return 1\n".encode(), PATH), (f"{PATH}={{at}}/reward.txt: must be a Python file",)),
    Case("reward", "an empty file", written("reward.py", b"", PATH), (f"{NAME}=compute_score: {{at}}/reward.py does not define it; it defines nothing",)),
    Case("reward", "a return outside a function", scorer("return 1\n" + CALL + "    return 1\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "Python 2", scorer(f"{CALL}    print 'a'\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "mixed indentation", scorer(f"{CALL}    if 1:\n\treturn 1\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "brackets nested too deep", scorer("x = " + "(" * 5000 + ")" * 5000 + "\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "an expression nested too deep", scorer("x = " + "-" * 50000 + "1\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python",)),
    Case("reward", "a notebook", written("reward.py", b'{"cells": [], "metadata": {}}', PATH), (f"{NAME}=compute_score: ",)),
    Case("reward", "a list instead of a function", scorer("compute_score = [1]\n", whole=True), (f"{NAME}=compute_score: must be a function",)),
    Case("reward", "parameters by position only", scorer("def compute_score(data_source, solution_str, ground_truth, extra_info, /):\n    return 1\n", whole=True), (f"{NAME}=compute_score: ", "cannot be called")),
    Case("reward", "no parameter", scorer("def compute_score():\n    return 1\n", whole=True), (f"{NAME}=compute_score: ", "cannot be called")),
    Case("reward", "an empty name", scorer("return 1", extra={NAME: "''"}), (f"{NAME}='': must be",)),
    Case("reward", "a number as a name", scorer("return 1", extra={NAME: 7}), (f"{NAME}=7: must be a string",)),
    Case("reward", "a list of arguments", scorer("return 1", extra={"custom_reward_function.reward_kwargs": "[1]"}), ("custom_reward_function.reward_kwargs=[1]: must be a mapping",)),
    Case("reward", "no memory for programs", {"reward_model.sandbox_fusion.memory_limit_mb": 0}, ("reward_model.sandbox_fusion.memory_limit_mb=0: must be",)),
    Case("reward", "no request at once", {"reward_model.sandbox_fusion.max_concurrent": 0}, ("reward_model.sandbox_fusion.max_concurrent=0: must be",)),
    Case("reward", "an address of another kind", {"reward_model.sandbox_fusion.url": "ftp://host/run"}, ("reward_model.sandbox_fusion.url=ftp://host/run: must be",)),
    Case("reward", "returns a number that is too large", scorer("return 10**400", extra=NO_FAILURE), ("the scorer returned",), late="together"),
    Case("reward", "returns a list of numbers", scorer("return {'score': [1.0]}", extra=NO_FAILURE), ("the scorer returned",), late="together"),
    Case("reward", "raises a message of many lines", scorer("raise ValueError('bad\\n' * 200)", extra=NO_FAILURE), ("the scorer raised ValueError: bad",), late="together"),
    Case("reward", "returns a complex number", scorer("return 1j", extra=NO_FAILURE), ("the scorer returned 1j; a scorer must return a number",), late="together"),
    Case("reward", "returns an empty tuple", scorer("return ()", extra=NO_FAILURE), ("the scorer returned (); a scorer must return a number",), late="together"),
    Case("reward", "returns null as score", scorer("return {'score': None}", extra=NO_FAILURE), ("the scorer returned {'score': None}; a scorer must return a number",), late="together"),
    Case("reward", "returns an array of two", scorer("import numpy; return numpy.ones(2)", extra=NO_FAILURE), ("the scorer returned array([1., 1.]); a scorer must return a number",), late="together"),
    Case("reward", "returns an extra that is too large", scorer("return {'score': 1, 'acc': 10**400}", extra=NO_FAILURE), ("the scorer returned an extra 'acc' beyond the range of a float",), late="together"),
    Case("reward", "returns infinity", scorer("return float('inf')", extra=NO_FAILURE), ("the scorer returned inf, which is not finite",), late="together"),
]

FROM = {"trainer.resume_mode": "resume_path"}

CHECKPOINT = [
    Case("checkpoint", "a misspelled resume mode", {"trainer.resume_mode": "resume"}, ("trainer.resume_mode=resume: must be one of auto, disable, resume_path",)),
    Case("checkpoint", "no path to resume from", FROM | {"trainer.resume_from_path": None}, ("trainer.resume_from_path=null: must name a global_step_<N> folder",)),
    Case("checkpoint", "a path without a step number", FROM | {"trainer.resume_from_path": "/nowhere/actor"}, ("trainer.resume_from_path=/nowhere/actor: must name a global_step_<N> folder",)),
    Case("checkpoint", "a folder that does not exist", FROM | {"trainer.resume_from_path": "/nowhere/global_step_3"}, ("trainer.resume_from_path=/nowhere/global_step_3: no such folder",)),
    Case("checkpoint", "a tracker that holds no number", checkpoint(edited("latest_checkpointed_iteration.txt", b"two")), ("{at}/run/latest_checkpointed_iteration.txt holds 'two' instead of a step", "The latest complete one is {at}/run/global_step_2", "trainer.resume_mode=disable starts from scratch")),
    Case("checkpoint", "a tracker of a step that is not there", checkpoint(edited("latest_checkpointed_iteration.txt", b"5")), ("checkpoint {at}/run/global_step_5 cannot be resumed from: the folder does not exist", "trainer.resume_from_path={at}/run/global_step_2")),
    Case("checkpoint", "a truncated model file", checkpoint(cut="actor/model_world_size_1_rank_0.pt"), ("actor: model_world_size_1_rank_0.pt has ", "it was truncated or changed", "trainer.resume_from_path={at}/run/global_step_1")),
    Case("checkpoint", "no optimizer file", checkpoint(gone="actor/optim_world_size_1_rank_0.pt"), ("actor: optim_world_size_1_rank_0.pt is missing", "trainer.resume_from_path={at}/run/global_step_1")),
    Case("checkpoint", "a flipped bit", checkpoint(flip="actor/model_world_size_1_rank_0.pt"), ("actor: model_world_size_1_rank_0.pt has the right size but the wrong content (checksum)",)),
    Case("checkpoint", "no manifest", checkpoint(gone="actor/manifest_world_size_1_rank_0.json"), ("manifest_world_size_1_rank_0.json is missing: rank 0 did not finish writing",)),
    Case("checkpoint", "no layout file", checkpoint(gone="actor/fsdp_config.json"), ("actor: fsdp_config.json is missing",)),
    Case("checkpoint", "another number of workers", checkpoint(world_size=2), ("actor: it was written by 2 ranks", "trainer.n_gpus_per_node")),
    Case("checkpoint", "truncated loader state", checkpoint(cut="data.pt"), ("data.pt", "is truncated", "trainer.resume_from_path={at}/run/global_step_1")),
    Case("checkpoint", "no loader state", checkpoint(gone="data.pt"), ("data.pt is missing: without it the training data would start over. Copy it back", "trainer.resume_from_path={at}/run/global_step_1")),
    Case("checkpoint", "a loader state that runs code", checkpoint(prepared="data.pt"), ("data.pt names builtins.print, which may run code", "trainer.trusted_classes=[builtins.print]")),
    Case("checkpoint", "a folder with the number of another step", checkpoint(renamed=7), ("actor: it was saved at step 2, the folder's name says 7",)),
    Case("checkpoint", "no checkpoint of the critic", checkpoint(extra={"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8, "critic.model.path": "{model}"}), ("critic: the folder {at}/run/global_step_2/critic does not exist",)),
    Case("checkpoint", "resuming from HDFS", {"trainer.default_hdfs_dir": "hdfs://runs/mine"}, ("trainer.default_hdfs_dir=hdfs://runs/mine: resuming from it is not supported", "trainer.resume_mode=disable")),
    Case("checkpoint", "tensors of another model", checkpoint(), ("model_world_size_1_rank_0.pt belongs to another model: it lacks",), late="together"),
]

TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = "global_step_2/actor/fsdp_config.json"
MANIFEST = "global_step_2/actor/manifest_world_size_1_rank_0.json"
DAMAGED = "checkpoint {at}/run/global_step_2 cannot be resumed from"

CHECKPOINT += [
    *(Case("checkpoint", f"a tracker that {how}", checkpoint(edited(TRACKER, content)), (f"{{at}}/run/{TRACKER} holds",)) for how, content in (
        ("is empty", b""), ("is negative", b"-2"), ("holds a fraction", b"2.0"), ("holds a superscript", "²".encode()), ("holds bytes", b"\xff\xfe\x00"),
        ("holds a number of a thousand digits", b"9" * 1000), ("names a folder", b"global_step_2"))),
    *(Case("checkpoint", f"a tracker that is a {kind}", checkpoint(odd=(kind, TRACKER)), (f"{{at}}/run/{TRACKER}",)) for kind in ("pipe", "socket", "loop")),
    *(Case("checkpoint", f"a layout that {how}", checkpoint(edited(LAYOUT, content)), (f"{DAMAGED}: actor: fsdp_config.json cannot be read",)) for how, content in (
        ("is empty", b""), ("is a list", b"[1]"), ("lacks its ranks", b"{}"), ("has text as ranks", b'{"world_size": "one"}'), ("has no rank", b'{"world_size": 0}'),
        ("has a billion ranks", b'{"world_size": 1000000000}'), ("has half a rank", b'{"world_size": 0.5}'), ("is nested too deep", b"[" * 100000))),
    Case("checkpoint", "a layout that is a pipe", checkpoint(odd=("pipe", LAYOUT)), (f"{DAMAGED}: actor: fsdp_config.json cannot be read",)),
    *(Case("checkpoint", f"a manifest that {how}", checkpoint(edited(MANIFEST, content)), (f"{DAMAGED}: actor: manifest_world_size_1_rank_0.json cannot be read",)) for how, content in (
        ("is empty", b""), ("is a list", b"[]"), ("lacks its files", b'{"world_size": 1}'), ("has a file without a size", b'{"world_size": 1, "rank": 0, "global_step": 2, "files": [{"name": "a"}]}'),
        ("has text as files", b'{"world_size": 1, "rank": 0, "global_step": 2, "files": "all"}'))),
    Case("checkpoint", "a manifest that is a pipe", checkpoint(odd=("pipe", MANIFEST)), (f"{DAMAGED}: actor: manifest_world_size_1_rank_0.json cannot be read",)),
    Case("checkpoint", "loader state that is a pipe", checkpoint(odd=("pipe", "global_step_2/data.pt")), (f"{DAMAGED}: data.pt",)),
    Case("checkpoint", "loader state of zeros", checkpoint(edited("global_step_2/data.pt", bytes(1000))), (f"{DAMAGED}: data.pt",)),
    Case("checkpoint", "a file of weights that is a dangling link", checkpoint(odd=("dangling", "global_step_2/actor/model_world_size_1_rank_0.pt")), (f"{DAMAGED}: actor: model_world_size_1_rank_0.pt is missing",)),
    Case("checkpoint", "a manifest of a step below zero", checkpoint(edited(MANIFEST, b'{"world_size": 1, "rank": 0, "global_step": -2, "files": []}')), (f"{DAMAGED}: actor: it was saved at step -2",)),
    Case("checkpoint", "a path to the folder of the run", lambda at: FROM | {"trainer.resume_from_path": at.folder}, ("trainer.resume_from_path={at}: must name a global_step_<N> folder",)),
    Case("checkpoint", "a path that is a file", lambda at: FROM | {"trainer.resume_from_path": f"{at.workspace.folder}/train.parquet"}, ("trainer.resume_from_path=", "train.parquet: must name a global_step_<N> folder")),
    Case("checkpoint", "a path with a superscript", FROM | {"trainer.resume_from_path": "'/nowhere/global_step_²'"}, ("trainer.resume_from_path=/nowhere/global_step_²: must name a global_step_<N> folder",)),
    Case("checkpoint", "a number as a path", FROM | {"trainer.resume_from_path": 7}, ("trainer.resume_from_path=7: must be a string",)),
]

MODEL_PATH = f"{MODEL}.path"

MODEL_CASES = [
    Case("model", "a folder that does not exist", {MODEL_PATH: "/nowhere/model"}, (f"{MODEL_PATH}=/nowhere/model: no such folder", "hub id")),
    Case("model", "a file", lambda at: {MODEL_PATH: f"{at.workspace.model}/config.json"}, (f"{MODEL_PATH}=", "config.json: is a file: write the folder")),
    Case("model", "an empty folder", lambda at: {MODEL_PATH: at.folder}, (f"{MODEL_PATH}={{at}}: has no config.json",)),
    Case("model", "a truncated config.json", model(cut="config.json"), (f"{MODEL_PATH}={{at}}/model: {{at}}/model/config.json is not readable JSON", "copy the model again")),
    Case("model", "no tokenizer", model(gone=("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")), (f"{MODEL}.tokenizer_path={{at}}/model: the folder holds no tokenizer",)),
    Case("model", "no weights", model(gone=("model.safetensors",)), (f"{MODEL_PATH}={{at}}/model: holds no weights",)),
    Case("model", "truncated weights", model(cut="model.safetensors"), (f"{MODEL_PATH}: {{at}}/model/model.safetensors: is cut short",)),
    Case("model", "a file that holds no weights", model(text={"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}), (f"{MODEL_PATH}: {{at}}/model/model.safetensors: is not a safetensors file",)),
    Case("model", "an index that names missing files", model(text={"model.safetensors.index.json": '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}'}), ("names weight files that are missing: ['model-2.safetensors']",)),
    Case("model", "a corrupt tokenizer.json", model(cut="tokenizer.json"), (f"{MODEL}.tokenizer_path={{at}}/model", "tokenizer.json is not readable JSON")),
    Case("model", "an unknown model type", model(config={"model_type": "qwen99", "architectures": ["Qwen99ForCausalLM"]}), (f"{MODEL_PATH}={{at}}/model", "qwen99")),
    Case("model", "a vision tower that several workers cannot share", model(config={"model_type": "gemma3", "vision_config": {}}, extra=TWO), (f"{MODEL_PATH}={{at}}/model: is of model_type 'gemma3', which runs on one worker only", "use one worker")),
    Case("model", "an activation that Megatron-Core does not have", model(config={"hidden_act": "gelu"}, extra={"--config-name": "ppo_megatron_trainer"}), (f"{MODEL_PATH}={{at}}/model: hidden_act=gelu is not supported with strategy=megatron: it knows silu", "write --config-name=ppo_trainer")),
    Case("model", "a context that is too short", {"data.max_response_length": 2000}, ("data.max_response_length=2000: plus prompts of 48 tokens exceeds the model's 1024 positions: write at most 976",)),
    Case("model", "heads that the engine does not have", odd_heads, ("vLLM's CPU attention has no kernel for head size 16 of actor_rollout_ref.model.path; it has [32,", "actor_rollout_ref.rollout.name=hf"), late="alone"),
    Case("model", "no chat template", model(gone=("chat_template.jinja",)), ("has no chat template", f"{MODEL}.custom_chat_template")),
    Case("model", "adapters for layers that it does not have", {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": "[no_proj]"}, ("model.target_modules=['no_proj']",), late="alone"),
    Case("model", "weights of other sizes", model(config={"intermediate_size": 256}), ("tensor 'model.layers.0.mlp.gate_proj.weight' in {at}/model/model.safetensors has shape (512, 128), the model of its config.json needs (256, 128)",), late="alone"),
    Case("model", "a config.json that contradicts itself", model(config={"num_hidden_layers": 3}, extra=NO_WORKERS), ("{at}/model", "`num_hidden_layers` (3) must be equal to the number of `layer_types` (2)"), late="alone"),
    Case("model", "a missing tensor", model(without_tensor="model.norm.weight"), ("the checkpoint lacks 1 tensors of the model, the first is 'model.norm.weight'",), late="alone"),
]

IN_CONFIG = f"{MODEL_PATH}={{at}}/model: {{at}}/model/config.json"
WEIGHTS = f"{MODEL_PATH}: {{at}}/model/model.safetensors"


def _header(**tensor: object) -> bytes:
    return json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | tensor}).encode()


MODEL_CASES += [
    *(Case("model", f"a config.json that {how}", model(text={"config.json": content}), (f"{IN_CONFIG}",)) for how, content in (
        ("is empty", ""), ("is a list", "[]"), ("is text", '"qwen2"'), ("is null", "null"), ("has no model_type", "{}"), ("is nested too deep", "[" * 100000), ("is HTML", "<html>"))),
    *(Case("model", f"{key}={json.dumps(value)}", model(config={key: value}), (f"{IN_CONFIG} has {key}={json.dumps(value)}",)) for key, value in (
        ("model_type", None), ("model_type", 7), ("hidden_size", "large"), ("hidden_size", 0), ("hidden_size", -128), ("hidden_size", 1.5), ("vocab_size", 0), ("vocab_size", 10**12),
        ("intermediate_size", 0), ("max_position_embeddings", "many"), ("head_dim", 0), ("attention_dropout", 2), ("text_config", 7), ("vision_config", 7), ("rope_scaling", "yarn"),
        ("num_hidden_layers", -1), ("num_attention_heads", 0), ("num_key_value_heads", 0), ("num_key_value_heads", 3), ("torch_dtype", "float17"), ("dtype", "bfloat61"), ("dtype", 16))),
    *(Case("model", f"architectures={json.dumps(value)}", model(config={"architectures": value}), (f"{MODEL_PATH}={{at}}/model: its config.json has architectures=",)) for value in (
        [], ["Qwen2ForCausalLM", "LlamaForCausalLM"], "Qwen2ForCausalLM", ["Qwen99ForCausalLM"], [7])),
    Case("model", "quantized weights", model(config={"quantization_config": {"quant_method": "gptq"}}), (f"{MODEL_PATH}={{at}}/model: its weights are quantized", "gptq")),
    *(Case("model", f"a {name} that is a {kind}", model(odd=(kind, name)), (f"{{at}}/model/{name} is ",)) for name, kind in (
        ("config.json", "pipe"), ("model.safetensors", "pipe"), ("tokenizer.json", "pipe"), ("tokenizer_config.json", "socket"), ("preprocessor_config.json", "pipe"),
        ("model.safetensors", "dangling"), ("config.json", "loop"))),
    *(Case("model", f"weights {how}", maker, (WEIGHTS,)) for how, maker in (
        ("of zeros", header(b"", 0)), ("whose header is a list", header(b"[]")), ("whose header is longer than the file", header(b"{}", 2**62)), ("whose header is text", header(b"hello")),
        ("whose tensor ends before it starts", header(_header(data_offsets=[8, 0]))), ("whose offsets are text", header(_header(data_offsets="all"))), ("without offsets", header(b'{"a": {}}')),
        ("with a tensor beyond the end", header(_header(data_offsets=[0, 10**9]))), ("whose tensor is a number", header(b'{"a": 7}')))),
    *(Case("model", f"an index that {how}", model(text={"model.safetensors.index.json": content}), ("{at}/model/model.safetensors.index.json",)) for how, content in (
        ("is empty", ""), ("is a list", "[]"), ("lacks its map", "{}"), ("has a list as map", '{"weight_map": []}'), ("names no file", '{"weight_map": {}}'), ("names numbers", '{"weight_map": {"a": 7}}'))),
    Case("model", "garbage in pytorch_model.bin", model(gone=("model.safetensors",), text={"pytorch_model.bin": "hello"}), (f"{MODEL_PATH}: {{at}}/model/pytorch_model.bin: is not a file of torch.save",)),
    Case("model", "a model on HDFS without the command for it", {f"{MODEL}.path": "hdfs://models/a"}, (f"{MODEL}.path=hdfs://models/a: HDFS paths need the `hdfs` command",)),
    Case("model", "a socket instead of a folder", special("socket", MODEL_PATH), (f"{MODEL_PATH}={{at}}/odd.parquet",)),
    Case("model", "an empty path", {MODEL_PATH: "''"}, (f"{MODEL_PATH}='': ",)),
    Case("model", "a number as path", {MODEL_PATH: 7}, (f"{MODEL_PATH}=7: must be a string",)),
    Case("model", "a tokenizer that does not exist", {f"{MODEL}.tokenizer_path": "/nowhere/tokenizer"}, (f"{MODEL}.tokenizer_path=/nowhere/tokenizer",)),
    Case("model", "a size of the overrides that is text", {f"+{MODEL}.override_config.hidden_size": "large"}, (f"{MODEL}.override_config", "hidden_size")),
    Case("model", "a module that cannot be found", {f"{MODEL}.external_lib": "no_such_module"}, (f"{MODEL}.external_lib=no_such_module: cannot find",)),
    Case("model", "a reference that does not exist", {"+actor_rollout_ref.ref.model.path": "/nowhere/ref"}, ("actor_rollout_ref.ref.model.path=/nowhere/ref",)),
    Case("model", "a critic that does not exist", {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8, "critic.model.path": "/nowhere/critic"}, ("critic.model.path=/nowhere/critic: no such folder",)),
    Case("model", "a reward model that does not exist", {"reward_model.enable": True, "reward_model.micro_batch_size_per_gpu": 8, "reward_model.model.path": "/nowhere/judge"}, ("reward_model.model.path=/nowhere/judge",)),
    Case("model", "a reward model without a head", lambda at: {"reward_model.enable": True, "reward_model.micro_batch_size_per_gpu": 8, "reward_model.model.path": at.workspace.model, "reward_model.model.input_tokenizer": None}, ("reward_model.model.path=", "score.weight")),
    Case("model", "a reference with another vocabulary", model(swapped=("a", "b"), key="+actor_rollout_ref.ref.model.path", extra={f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8}), ("actor_rollout_ref.ref.model.path={at}/model: reads the tokens of actor_rollout_ref.model.path with another vocabulary: the token 'a' has the id",)),
    Case("model", "a critic with a head of several layers", model(with_tensor="v_head.0.weight", key="critic.model.path", extra={"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8}), ("critic.model.path={at}/model: it holds 'v_head.0.weight', of a value head that is not read",)),
    *(Case("model", f"a tokenizer.json that {how}", model(text={"tokenizer.json": content}), ("{at}/model", "tokenizer.json")) for how, content in (
        ("is empty", ""), ("is a list", "[]"), ("is text", '"words"'), ("is an empty mapping", "{}"))),
    *(Case("model", f"a config.json with {key}={json.dumps(value)}", model(config={key: value}, extra=NO_WORKERS), ("{at}/model", key, one), late="alone") for key, value, one in (
        ("layer_types", ["full", "other"], "full_attention"), ("tie_word_embeddings", "maybe", "maybe"), ("rms_norm_eps", "small", "small"))),
    Case("model", "an activation that transformers does not have", model(config={"hidden_act": "none_such"}), ("{at}/model: its config.json names 'none_such'",), late="alone"),
    Case("model", "a length of the tokenizer that is text", model(settings={"model_max_length": "long"}), ("{at}/model", 'tokenizer_config.json has model_max_length="long"')),
    Case("model", "a padding side that does not exist", model(settings={"padding_side": "up"}, extra=NO_WORKERS), ("cannot load a tokenizer from '{at}/model'", "up"), late="alone"),
    Case("model", "a number as the token that ends a response", model(settings={"eos_token": 7}, extra=NO_WORKERS), ("cannot load a tokenizer from '{at}/model'", "eos_token"), late="alone"),
    Case("model", "a generation_config.json that is a list", model(text={"generation_config.json": "[]"}), ("{at}/model", "generation_config.json holds a list")),
    Case("model", "an index that leads out of its folder", model(text={"model.safetensors.index.json": '{"weight_map": {"a": "../weights"}}'}), ("{at}/model/model.safetensors.index.json",)),
    Case("model", "a tokenizer_config.json that is a list", model(text={"tokenizer_config.json": "[]"}), ("{at}/model", "tokenizer_config.json")),
    Case("model", "a chat template with an error", {f"{MODEL}.custom_chat_template": "'{% for m in messages %}'"}, (f"{MODEL}.custom_chat_template",)),
    Case("model", "a chat template of the model with an error", model(text={"chat_template.jinja": "{% for m in messages %}"}), ("{at}/model", "chat_template.jinja")),
]

CASES = [*CONFIG, *DATA, *REWARD, *CHECKPOINT, *MODEL_CASES, *COMMANDS]
