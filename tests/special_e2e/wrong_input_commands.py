# ruff: noqa: E501 (a case reads as a row of a table)
"""The table of wrong inputs, continued: environments, and the commands other than ``main_ppo``."""

import json
from collections.abc import Callable, Mapping, Sequence

from .wrong_input_files import lines, make_special, model, rows, special, table, twice, written
from .wrong_inputs import Case, Place, Words

SFT, OLDER_SFT = "verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer"
GENERATION, EVALUATION = "verl.trainer.main_generation", "verl.trainer.main_eval"
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
TRAIN = "data.train_files"
FROM = {"trainer.resume_mode": "resume_path"}


def files(
    words: Sequence[str], content: Mapping[str, bytes] | None = None, odd: Mapping[str, str] | None = None
) -> Callable[[Place], Words]:
    """Write files, and what is no file, and return the words of a command; ``{at}`` is their folder."""

    def make(place: Place) -> Words:
        for name, text in (content or {}).items():
            path = place.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        for name, kind in (odd or {}).items():
            make_special(kind, place.folder / name)
        return words

    return make


# fmt: off
ENVIRONMENT = [
    Case("environment", "a module that is not there", {}, (f"{EXTERNAL}=no_such_module", "cannot import"), environment={EXTERNAL: "no_such_module"}),
    Case("environment", "one of two modules that is not there", {}, (f"{EXTERNAL}=json,no_such_module", "'no_such_module'"), environment={EXTERNAL: "json,no_such_module"}),
    Case("environment", "a module with a syntax error", written("mine.py", b"def f(:\n", "trainer.experiment_name", {"trainer.experiment_name": "a"}), (f"{EXTERNAL}=mine", "SyntaxError"), environment={EXTERNAL: "mine"}),
    Case("environment", "a module that raises", written("mine.py", b"1 / 0\n", "trainer.experiment_name", {"trainer.experiment_name": "a"}), (f"{EXTERNAL}=mine", "ZeroDivisionError"), environment={EXTERNAL: "mine"}),
    *(Case("environment", f"{name}={value}", {}, (f"environment variable {name}=", value), environment={name: value}) for name, value in (
        ("VERL_PROGRESS", "loud"), ("VERL_AUTO_PADDING", "maybe"), ("VERL_CHECK_PHASES", "maybe"), ("VERL_USE_MODELSCOPE", "maybe"), ("VERL_DATAPROTO_SERIALIZATION_METHOD", "xml"), ("VERL_FILE_LOGGER_PATH", "/dev/null/a.jsonl"),
        ("VERL_FILE_LOGGER_ROOT", "/dev/null"), ("TMPDIR", "/dev/null"), ("RAY_TMPDIR", "/dev/null"), ("RAY_TMPDIR", "/tmp/" + "x" * 120), ("RAY_ADDRESS", "head"), ("RAY_ADDRESS", "127.0.0.1:70000"), ("RAY_ADDRESS", "127.0.0.1:1"))),
    *(Case("environment", f"supervised training with {name}={value}", {}, (f"{name}=", value), command=SFT, environment={name: value}) for name, value in (
        ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1"), ("RANK", "one"), ("RANK", "7"), ("LOCAL_WORLD_SIZE", "0"))),
    Case("environment", "several processes without torchrun", {}, ("WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT",), command=SFT, environment={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}),
    Case("environment", "text as the number of processes", {}, ("WORLD_SIZE='two'",), command=SFT, environment={"WORLD_SIZE": "two"}),
    Case("environment", "text as the number of processes of a node", {}, ("LOCAL_WORLD_SIZE='two'",), command=SFT, environment={"LOCAL_WORLD_SIZE": "two"}),
    Case("environment", "processes that cannot share a batch", {}, ("data.train_batch_size=8: must be a multiple of the 3",), command=SFT, environment={"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}),
]

SUPERVISED = [
    *(Case("sft", f"{key}={value}", {key: value}, (f"{key}={value}", "must be"), command=SFT) for key, value in (
        ("optim.lr", "inf"), ("optim.lr", "nan"), ("trainer.seed", 2**70), ("data.train_batch_size", 0), ("data.max_length", 0), ("trainer.total_epochs", 0), ("trainer.device", "tpu"), ("data.truncation", "cut"),
        ("data.pad_mode", "left"), ("trainer.resume_mode", "always"), ("engine.strategy", "ddp"), ("trainer.logger", "[wandbb]"), ("data.max_token_len_per_gpu", 0))),
    Case("sft", "a key that does not exist", {"trainer.epochs": 1}, ("trainer.epochs=1: there is no such key",), command=SFT),
    Case("sft", "a tracker that is not installed", {"trainer.logger": "[console,clearml]"}, ("trainer.logger", "clearml", "not installed"), command=SFT),
    Case("sft", "rows of reinforcement learning", lambda at: {TRAIN: at.workspace.folder / "train.parquet"}, ("train.parquet, column 'messages' (data.messages_key): is missing",), command=SFT),
    Case("sft", "rows of reinforcement learning for text pairs", lambda at: {TRAIN: at.workspace.folder / "train.parquet"}, ("train.parquet, column 'question' (data.prompt_key): is missing",), command=OLDER_SFT),
    Case("sft", "a file that does not exist", {TRAIN: "/nowhere/train.parquet"}, (f"{TRAIN}=/nowhere/train.parquet: no such file",), command=SFT),
    Case("sft", "a file on HDFS without its command", {TRAIN: "hdfs://data/train.parquet"}, (f"{TRAIN}=hdfs://data/train.parquet: HDFS paths need the `hdfs` command",), command=SFT),
    *(Case("sft", f"a {kind} instead of a file", special(kind, TRAIN), (f"{TRAIN}={{at}}/odd.parquet: is a",), command=SFT) for kind in ("pipe", "socket", "loop", "dangling")),
    Case("sft", "garbage instead of parquet", written("train.parquet", b"hello", TRAIN), ("{at}/train.parquet: cannot be read as parquet",), command=SFT),
    Case("sft", "garbage instead of JSON lines", lines("nonsense"), ("{at}/train.jsonl: cannot be read as JSON lines",), command=SFT),
    Case("sft", "two columns of one name", twice("prompt"), ("{at}/train.parquet: has 2 columns named 'prompt'",), command=SFT),
    Case("sft", "text as messages", table({"messages": ["a"] * 16}), ("{at}/train.parquet, row 0, column 'messages' (data.messages_key): must be a list of messages",), command=SFT),
    Case("sft", "strings as messages", table({"messages": [["a"]] * 16}), ("{at}/train.parquet, row 0, column 'messages' (data.messages_key): must be a list of messages",), command=SFT),
    Case("sft", "a conversation without a message", table({"messages": [[{"role": "user", "content": "a"}]] * 3 + [[]] * 13}), ("{at}/train.parquet, row 3, column 'messages' (data.messages_key): is empty",), command=SFT),
    Case("sft", "no conversation in a row", table({"messages": [[{"role": "user", "content": "a"}]] * 3 + [None] * 13}), ("{at}/train.parquet, row 3, column 'messages' (data.messages_key): is null",), command=SFT),
    Case("sft", "no column of responses", lambda at: {"data.response_key": "reply", "data.prompt_key": "question"}, ("column 'reply' (data.response_key): is missing",), command=OLDER_SFT),
    Case("sft", "a model that does not exist", {"model.path": "/nowhere/model"}, ("model.path=/nowhere/model: no such folder",), command=SFT),
    Case("sft", "a model with cut weights", model(cut="model.safetensors", key="model.path"), ("model.path: {at}/model/model.safetensors: is cut short",), command=SFT),
    Case("sft", "a model of another dtype", model(config={"dtype": "float17"}, key="model.path"), ("model.path={at}/model", 'dtype="float17"'), command=SFT),
    Case("sft", "a model of the older keys that does not exist", {"model.partial_pretrain": "/nowhere/model"}, ("model.partial_pretrain=/nowhere/model: no such folder",), command=OLDER_SFT),
    Case("sft", "a checkpoint that does not exist", FROM | {"trainer.resume_from_path": "/nowhere/global_step_3"}, ("trainer.resume_from_path=/nowhere/global_step_3: no such folder",), command=SFT),
    Case("sft", "a checkpoint without a step number", FROM | {"trainer.resume_from_path": "/nowhere/last"}, ("trainer.resume_from_path=/nowhere/last: must name a global_step_<N> folder",), command=SFT),
    Case("sft", "no checkpoint to resume from", FROM, ("trainer.resume_from_path=null: must name a global_step_<N> folder",), command=SFT),
    Case("sft", "a path to resume from that auto follows", {"trainer.resume_from_path": "/nowhere/global_step_3"}, ("trainer.resume_from_path=/nowhere/global_step_3: no such folder",), command=SFT),
    Case("sft", "a checkpoint that is a file", written("global_step_3", b"", "trainer.resume_from_path", FROM), ("{at}/global_step_3",), command=SFT),
    Case("sft", "a tracker that holds no number", written("run/latest_checkpointed_iteration.txt", b"two", "trainer.experiment_name", {"trainer.experiment_name": "a"}), ("{at}/run/latest_checkpointed_iteration.txt holds 'two'",), command=SFT),
]

OUTPUT = "data.output_path"
OFFLINE = [
    *(Case("offline", f"generation with {key}={value}", {key: value}, (f"{key}={value}", "must be"), command=GENERATION) for key, value in (
        ("data.n_samples", 0), ("data.n_samples", 10**9), ("data.batch_size", "many"), ("rollout.temperature", 1e-30), ("rollout.top_p", 2), ("trainer.n_gpus_per_node", 0), ("trainer.device", "tpu"), ("rollout.mode", "async"))),
    Case("offline", "generation for a file that does not exist", {"data.path": "/nowhere/a.parquet"}, ("data.path=/nowhere/a.parquet: no such file",), command=GENERATION),
    Case("offline", "generation for a file on HDFS without its command", {"data.path": "hdfs://data/a.parquet"}, ("data.path=hdfs://data/a.parquet: HDFS paths need the `hdfs` command",), command=GENERATION),
    Case("offline", "generation for a pipe", special("pipe", "data.path"), ("data.path={at}/odd.parquet: is a named pipe",), command=GENERATION),
    Case("offline", "generation into its input", lambda at: {OUTPUT: at.workspace.folder / "train.parquet"}, (f"{OUTPUT}=", "must not be data.path"), command=GENERATION),
    Case("offline", "generation into a folder", lambda at: {OUTPUT: at.folder}, (f"{OUTPUT}={{at}}: is a folder",), command=GENERATION),
    Case("offline", "generation below a file", lambda at: {OUTPUT: at.workspace.folder / "train.parquet" / "out.parquet"}, (f"{OUTPUT}=", "is not a writable folder"), command=GENERATION),
    Case("offline", "generation by a model that does not exist", {"model.path": "/nowhere/model"}, ("model.path=/nowhere/model: no such folder",), command=GENERATION),
    Case("offline", "generation for garbage", written("a.parquet", b"hello", "data.path"), ("{at}/a.parquet: cannot be read as parquet",), command=GENERATION),
    Case("offline", "generation for a column that is not there", {"data.prompt_key": "question"}, ("column 'question' (data.prompt_key): is missing",), command=GENERATION),
    *(Case("offline", f"evaluation with {key}={value}", {key: value}, (f"{key}={value}", "must be"), command=EVALUATION) for key, value in (("scoring.timeout_s", 0), ("scoring.timeout_s", "inf"), ("scoring.failure_score", "nan"))),
    Case("offline", "evaluation of a file that does not exist", {"data.path": "/nowhere/a.parquet"}, ("data.path=/nowhere/a.parquet: no such file",), command=EVALUATION),
    Case("offline", "evaluation of a file on HDFS without its command", {"data.path": "hdfs://data/a.parquet"}, ("data.path=hdfs://data/a.parquet: HDFS paths need the `hdfs` command",), command=EVALUATION),
    Case("offline", "evaluation of a socket", special("socket", "data.path"), ("data.path={at}/odd.parquet: is a socket",), command=EVALUATION),
    Case("offline", "evaluation of garbage", written("a.parquet", b"hello", "data.path"), ("{at}/a.parquet: cannot be read as parquet",), command=EVALUATION),
    Case("offline", "evaluation without responses", rows(key="data.path"), ("{at}/train.parquet, column 'responses' (data.response_key): is missing",), command=EVALUATION),
    Case("offline", "evaluation of numbers", table({"responses": [[1]] * 16}, key="data.path"), ("{at}/train.parquet, row 0, column 'responses' (data.response_key): must be a list of strings",), command=EVALUATION),
    Case("offline", "evaluation of a row without a response", table({"responses": [["a"]] * 7 + [[]] * 9}, key="data.path"), ("{at}/train.parquet, row 7, column 'responses' (data.response_key): is empty",), command=EVALUATION),
    Case("offline", "evaluation of an unknown data source", table({"responses": [["a"]] * 16}, key="data.path"), ("{at}/train.parquet, row 0, column 'data_source'", "'letters'"), command=EVALUATION),
    Case("offline", "evaluation by a scorer that does not exist", {"custom_reward_function.path": "/nowhere/r.py"}, ("custom_reward_function.path", "/nowhere/r.py"), command=EVALUATION),
]

VIEWER, CURVES, REPORT, MERGER = "scripts.rollout_viewer", "verl.utils.observe.curves", "verl.utils.report.__main__", "verl.model_merger.__main__"
RECORD = b'{"step": 1, "data": {"critic/score/mean": 1}}\n'
RAW = "--local_dataset_path"
QUESTION = json.dumps({"question": "1 + 1", "answer": "#### 2"}).encode()
TOOLS = [
    Case("tool", "viewer: a folder that does not exist", ["/nowhere"], ("/nowhere",), command=VIEWER),
    Case("tool", "viewer: an empty folder", files(["{at}"]), ("{at} holds no <step>.jsonl",), command=VIEWER),
    Case("tool", "viewer: a step that is not there", files(["{at}", "--step", "7"], {"1.jsonl": b"{}\n"}), ("--step 7", "1"), command=VIEWER),
    Case("tool", "viewer: a score that is no number", ["/nowhere", "--min-score", "high"], ("--min-score", "'high'"), command=VIEWER),
    *(Case("tool", f"viewer: {how}", files(["{at}"], {"1.jsonl": content}), ("{at}/1.jsonl, line 1: ",), command=VIEWER) for how, content in (
        ("text", b"hello\n"), ("a list", b"[1]\n"), ("bytes", b"\xff\xfe\n"), ("a score of text", b'{"score": "high"}\n'), ("a score of too many digits", b'{"score": 1' + b"0" * 5000 + b"}\n"), ("lines nested too deep", b"[" * 100000))),
    Case("tool", "viewer: a pipe", files(["{at}/1.jsonl"], odd={"1.jsonl": "pipe"}), ("{at}/1.jsonl",), command=VIEWER),
    Case("tool", "curves: a folder that does not exist", ["/nowhere"], ("/nowhere does not exist",), command=CURVES),
    *(Case("tool", f"curves: {how}", files(["{at}"], {"metrics.jsonl": content}), ("{at}/metrics.jsonl",), command=CURVES) for how, content in (
        ("an empty record", b""), ("text in a record", RECORD + b"hello\n" + RECORD), ("a list in a record", b"[1]\n" + RECORD), ("bytes in a record", b"\xff\xfe\n" + RECORD), ("a step of text", b'{"step": "one", "data": {}}\n' + RECORD))),
    Case("tool", "curves: a pipe", files(["{at}"], odd={"metrics.jsonl": "pipe"}), ("{at}/metrics.jsonl",), command=CURVES),
    Case("tool", "curves: a picture in a folder that does not exist", files(["{at}", "--output", "/nowhere/a.png"], {"metrics.jsonl": RECORD}), ("/nowhere/a.png",), command=CURVES),
    Case("tool", "curves: a picture of an unknown kind", files(["{at}", "--output", "{at}/a.xyz"], {"metrics.jsonl": RECORD}), ("xyz",), command=CURVES),
    Case("tool", "report: a folder that does not exist", ["/nowhere"], ("/nowhere does not exist",), command=REPORT),
    Case("tool", "report: text in a record", files(["{at}"], {"metrics.jsonl": b"hello\n" + RECORD}), ("{at}/metrics.jsonl",), command=REPORT),
    Case("tool", "report: a pipe", files(["{at}"], odd={"metrics.jsonl": "pipe"}), ("{at}/metrics.jsonl",), command=REPORT),
    Case("tool", "report: a run to compare that is not there", files(["compare", "{at}", "/nowhere"], {"metrics.jsonl": RECORD}), ("/nowhere",), command=REPORT),
    *(Case("tool", f"{script}: a folder that does not exist", [RAW, "/nowhere/raw", "--local_save_dir", "{at}/out"], (f"{RAW}=/nowhere/raw",), command=f"examples.data_preprocess.{script}") for script in ("gsm8k", "math_dataset", "geo3k")),
    Case("tool", "gsm8k: an empty folder", files([RAW, "{at}/raw", "--local_save_dir", "{at}/out"], {"raw/x": b""}), (f"{RAW}={{at}}/raw",), command="examples.data_preprocess.gsm8k"),
    Case("tool", "gsm8k: garbage", files([RAW, "{at}/raw", "--local_save_dir", "{at}/out"], {"raw/train.jsonl": b"hello\n", "raw/test.jsonl": b"hello\n"}), (f"{RAW}={{at}}/raw",), command="examples.data_preprocess.gsm8k"),
    Case("tool", "math: no test split", files([RAW, "{at}/raw", "--local_save_dir", "{at}/out"], {"raw/train.jsonl": b'{"problem": "1 + 1", "solution": "two"}'}), (f"{RAW}={{at}}/raw", "'test'"), command="examples.data_preprocess.math_dataset"),
    Case("tool", "math: other columns", files([RAW, "{at}/raw", "--local_save_dir", "{at}/out"], {"raw/train.jsonl": QUESTION, "raw/test.jsonl": QUESTION}), (f"{RAW}={{at}}/raw", "'problem'", "'question'"), command="examples.data_preprocess.math_dataset"),
    Case("tool", "math: a solution without an answer", files([RAW, "{at}/raw", "--local_save_dir", "{at}/out"], {f"raw/{split}.jsonl": b'{"problem": "1 + 1", "solution": "two"}' for split in ("train", "test")}), ("split 'train', row 0", "'two'"), command="examples.data_preprocess.math_dataset"),
    Case("tool", "gsm8k: a file as output folder", files(["--source", "synthetic", "--local_save_dir", "{at}/out"], {"out": b""}), ("--local_save_dir={at}/out",), command="examples.data_preprocess.gsm8k"),
    Case("tool", "gsm8k: a data set of the hub without network", ["--local_save_dir", "{at}/out"], ("openai/gsm8k", RAW), command="examples.data_preprocess.gsm8k"),
    Case("tool", "gsm8k: an unknown source", ["--source", "mine"], ("--source", "'mine'"), command="examples.data_preprocess.gsm8k"),
    Case("tool", "merger: a folder that does not exist", ["merge", "--backend", "fsdp", "--local_dir", "/nowhere/actor"], ("/nowhere/actor",), command=MERGER),
    Case("tool", "merger: an empty folder", files(["merge", "--backend", "fsdp", "--local_dir", "{at}/actor", "--target_dir", "{at}/out"], {"actor/x": b""}), ("{at}/actor",), command=MERGER),
    Case("tool", "merger: a layout that is a list", files(["merge", "--backend", "fsdp", "--local_dir", "{at}/actor", "--target_dir", "{at}/out"], {"actor/fsdp_config.json": b"[]"}), ("fsdp_config.json",), command=MERGER),
    Case("tool", "merger: an unknown backend", ["merge", "--backend", "ddp", "--local_dir", "/nowhere"], ("--backend", "'ddp'"), command=MERGER),
]

ROLLOUT, LIBRARY = "actor_rollout_ref.rollout", "actor_rollout_ref.model.external_lib"
ASYNC = {f"{ROLLOUT}.mode": "async"}


def code(module: str, overrides: Mapping[str, object]) -> Callable[[Place], Words]:
    """Write a module ``mine`` that a run imports."""

    def make(place: Place) -> Words:
        (place.folder / "mine.py").write_text(module)
        return {LIBRARY: "mine", **overrides}

    return make


ESTIMATOR = "from verl.algos.advantage import register_adv_est\n@register_adv_est('mine')\ndef estimate(**given): ...\n"
LOSS = "from verl.algos.policy_loss import register_policy_loss\n@register_policy_loss('mine')\ndef loss(*given): ...\n"
LOOP = "from verl.experimental.agent_loop.registry import register\n@register('mine')\nclass Loop: ...\n"

# fmt: off
CODE = [
    Case("code", "an estimator that its module registers by another name", code(ESTIMATOR, {"algorithm.adv_estimator": "mien"}), ("algorithm.adv_estimator=mien: Unknown advantage estimator: mine does not register it; write one of: mine",)),
    Case("code", "a loss that its module registers by another name", code(LOSS, {"actor_rollout_ref.actor.policy_loss.loss_mode": "mien"}), ("actor_rollout_ref.actor.policy_loss.loss_mode=mien: Unsupported loss mode: mine does not register it; write one of: mine",)),
    Case("code", "a reward manager that no module registers", code("print('a line')", {"reward_model.reward_manager": "naife"}), ("reward_model.reward_manager=naife: Unknown reward manager: mine does not register it; write one of: naive",)),
    Case("code", "an agent loop that its module registers by another name", code(LOOP, ASYNC | {f"{ROLLOUT}.agent.default_agent_loop": "mien"}), (f"{ROLLOUT}.agent.default_agent_loop=mien: is no agent loop: mine does not register it; write one of: mine",)),
    Case("code", "a format of tool calls that no module registers", code("", ASYNC | {f"{ROLLOUT}.multi_turn.format": "hermse"}), (f"{ROLLOUT}.multi_turn.format=hermse: is no format of tool calls: mine does not register it; write one of: hermes",)),
    Case("code", "a module that its package does not have", {LIBRARY: "verl.utils.no_such"}, (f"{LIBRARY}=verl.utils.no_such: the package verl.utils has no module no_such: write one that it has",)),
    Case("code", "a tool of a misspelled class", written("tools.yaml", b"tools:\n- class_name: verl.tools.gsm8k_tool.Gsm8kTol\n", f"{ROLLOUT}.multi_turn.tool_config_path", ASYNC), ("{at}/tools.yaml, tools[0].class_name=verl.tools.gsm8k_tool.Gsm8kTol: verl.tools.gsm8k_tool has no Gsm8kTol: write one of its classes: Gsm8kTool",)),
    Case("code", "a tool of a misspelled module", written("tools.yaml", b"tools:\n- class_name: verl.tools.gsm8k_tol.Gsm8kTool\n", f"{ROLLOUT}.multi_turn.tool_config_path", ASYNC), ("{at}/tools.yaml, tools[0].class_name=verl.tools.gsm8k_tol.Gsm8kTool: the package verl.tools has no module gsm8k_tol",)),
    Case("code", "an interaction of a misspelled class", written("users.yaml", b"interaction:\n- class_name: verl.interactions.gsm8k_interaction.Gsm8k\n", f"{ROLLOUT}.multi_turn.interaction_config_path", ASYNC), ("{at}/users.yaml, interaction[0].class_name=verl.interactions.gsm8k_interaction.Gsm8k: verl.interactions.gsm8k_interaction has no Gsm8k: write one of its classes: Gsm8kInteraction",)),
    Case("code", "an agent loop of a misspelled class", written("loops.yaml", b"- name: mine\n  _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgent\n", f"{ROLLOUT}.agent.agent_loop_config_path", ASYNC), ("{at}/loops.yaml, mine._target_=verl.experimental.agent_loop.tool_agent_loop.ToolAgent: verl.experimental.agent_loop.tool_agent_loop has no ToolAgent: write one of its classes: ToolAgentLoop",)),
    Case("code", "a module of supervised training that its package does not have", {"model.external_lib": "verl.utils.no_such"}, ("model.external_lib=verl.utils.no_such: the package verl.utils has no module no_such",), command=SFT),
]
# fmt: on

COMMANDS = [*ENVIRONMENT, *CODE, *SUPERVISED, *OFFLINE, *TOOLS]
