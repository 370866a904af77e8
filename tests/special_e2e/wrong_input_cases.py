# ruff: noqa: E501 (a case reads as a row of a table)
"""The table of wrong inputs: what each is, and what the message that it gets must hold."""

from .wrong_input_files import (
    checkpoint,
    edited,
    model,
    odd_heads,
    row,
    rows,
    scorer,
    written,
)
from .wrong_inputs import ABSENT, Case

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
NO_WORKERS = {"trainer.total_training_steps": None, "data.filter_overlong_prompts": True}
"""With these the workers start only after the data are read: cases that fail before save that time."""
NO_FAILURE = {"reward_model.scoring.max_failed_ratio": 0}
TWO = {"trainer.n_gpus_per_node": 2}

# fmt: off
CONFIG = [
    Case("config", "a key that does not exist", {"trainer.n_gpus": 1}, ("trainer.n_gpus=1: there is no such key; the nearest: trainer.n_gpus_per_node",)),
    Case("config", "an override without a value", {"trainer.total_epochs": ABSENT, "trainer.total_epochs 3": ""}, ("'trainer.total_epochs 3=' cannot be read: write key=value",)),
    Case("config", "a word where a number goes", {f"{ROLLOUT}.n": "abc"}, (f"{ROLLOUT}.n=abc: must be an integer",)),
    Case("config", "no rollout engine", {f"{ROLLOUT}.name": ABSENT}, (f"{ROLLOUT}.name=???: is missing: write vllm or hf",)),
    Case("config", "an unknown rollout engine", {f"{ROLLOUT}.name": "vlm"}, (f"{ROLLOUT}.name=vlm: must be one of vllm",)),
    Case("config", "both micro-batch keys", {f"{ACTOR}.ppo_micro_batch_size": 8}, (f"{ACTOR}.ppo_micro_batch_size=8: ", "set only ppo_micro_batch_size_per_gpu")),
    Case("config", "neither micro-batch key", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}, (f"{ACTOR}.ppo_micro_batch_size_per_gpu=null: set ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=true",)),
    Case("config", "a mini-batch that does not divide the batch", {f"{ACTOR}.ppo_mini_batch_size": 3}, (f"{ACTOR}.ppo_mini_batch_size=3: must divide data.train_batch_size=8",)),
    Case("config", "tensor parallelism that does not divide the workers", TWO | {f"{ROLLOUT}.tensor_model_parallel_size": 4}, (f"{ROLLOUT}.tensor_model_parallel_size=4: ", "must divide the 2 workers", "write one of [1, 2]")),
    Case("config", "Ulysses without padding removal", TWO | {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{MODEL}.use_remove_padding": False}, (f"{ACTOR}.ulysses_sequence_parallel_size=2: ", "use_remove_padding")),
    Case("config", "asynchronous rollout", {f"{ROLLOUT}.mode": "async"}, (f"{ROLLOUT}.mode=async: is not supported yet: write sync",)),
    Case("config", "a key that was replaced", {f"+{ACTOR}.tis_imp_ratio_cap": 2}, (f"{ACTOR}.tis_imp_ratio_cap=2: was replaced", "algorithm.rollout_is_threshold")),
    Case("config", "importance weights without the engine's log-probabilities", {"algorithm.rollout_is_threshold": 2.0, f"{ROLLOUT}.calculate_log_probs": False}, (f"{ROLLOUT}.calculate_log_probs=false: must be true with algorithm.rollout_is_threshold=2.0", "write true")),
    Case("config", "a misspelled advantage estimator", {"algorithm.adv_estimator": "grop"}, ("algorithm.adv_estimator=grop: is not registered; the nearest: grpo",)),
    Case("config", "a misspelled loss aggregation", {f"{ACTOR}.loss_agg_mode": "token_mean"}, (f"{ACTOR}.loss_agg_mode=token_mean: must be one of token-mean",)),
    Case("config", "a negative learning rate", {f"{ACTOR}.optim.lr": -1}, (f"{ACTOR}.optim.lr=-1: must be",)),
    Case("config", "training at temperature 0", {f"{ROLLOUT}.temperature": 0}, (f"{ROLLOUT}.temperature=0: must be above 0", "val_kwargs.do_sample")),
    Case("config", "an unknown tracker", {"trainer.logger": "[console,wandbb]"}, ("trainer.logger=[console,wandbb]: must be a list of trackers",)),
    Case("config", "a tracker that is not installed", {"trainer.logger": "[console,clearml]"}, ("trainer.logger", "clearml", "not installed", "[console]")),
    Case("config", "training on GPUs without one", {"trainer.device": "cuda"}, ("trainer.device=cuda", "no GPU", "write cpu")),
    Case("config", "training on Ascend devices without their package", {"trainer.device": "npu"}, ("trainer.device=npu: needs the package torch_npu", "write cuda or cpu")),
    Case("config", "Megatron-Core on Ascend devices", {"--config-name": "ppo_megatron_trainer", "trainer.device": "npu"}, (f"{ACTOR}.strategy=megatron: is not supported with trainer.device=npu", "--config-name=ppo_trainer")),
    Case("config", "more workers than cores", {"trainer.n_gpus_per_node": 512, "data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 512, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}, ("trainer.n_gpus_per_node=512", "cores", "ray_kwargs.ray_init.num_cpus")),
    Case("config", "several mistakes at once", {"data.truncation": "cut", "trainer.resume_mode": "always"}, ("2 problems:", "data.truncation=cut: must be one of error, left, right, middle", "trainer.resume_mode=always: must be one of auto")),
]

TRAIN = "data.train_files"

DATA = [
    Case("data", "a file that does not exist", {TRAIN: "/nowhere/train.parquet"}, (f"{TRAIN}=/nowhere/train.parquet: no such file", "examples/data_preprocess")),
    Case("data", "a folder instead of a file", lambda at: {TRAIN: at.folder}, (f"{TRAIN}={{at}}: is a folder: write the parquet file in it",)),
    Case("data", "an empty file", written("train.parquet", b"", TRAIN), (f"{TRAIN}={{at}}/train.parquet: is empty",)),
    Case("data", "a text file", written("train.parquet", b"prompt,answer\n1 + 1,2\n", TRAIN), (f"{TRAIN}={{at}}/train.parquet: cannot be read as parquet",)),
    Case("data", "a truncated file", rows(cut=100), (f"{TRAIN}={{at}}/train.parquet: cannot be read as parquet",)),
    Case("data", "no row", rows(count=0), ("{at}/train.parquet: has no row",)),
    Case("data", "fewer rows than a batch", rows(count=7), (f"{TRAIN}: 7 rows in all, fewer than data.train_batch_size=8",)),
    Case("data", "no prompt column", rows(drop="prompt"), ("train.parquet: has no column 'prompt' (data.prompt_key); it has",)),
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
    Case("data", "no prompt that fits", {"data.max_prompt_length": 8, **NO_WORKERS}, ("train.parquet", "all 64 prompts are longer than data.max_prompt_length=8: raise it"), late="alone"),
    Case("data", "a prompt that is too long", rows({4: row(4, "very " * 20)}, extra={"data.shuffle": False}), ("{at}/train.parquet, row 4, column 'prompt': the prompt has 103 tokens, data.max_prompt_length is 48: raise it, or set data.truncation to left, right or middle",), late="together"),
]

PATH, NAME = "custom_reward_function.path", "custom_reward_function.name"

REWARD = [
    Case("reward", "a file that does not exist", {PATH: "/nowhere/reward.py"}, (f"{PATH}=/nowhere/reward.py: no such file",)),
    Case("reward", "a syntax error", scorer("def compute_score(:\n", whole=True), (f"{PATH}={{at}}/reward.py: is not valid Python", "(reward.py, line 1)")),
    Case("reward", "a function that is not in the file", scorer("return 0", extra={NAME: "my_score"}), (f"{NAME}=my_score: {{at}}/reward.py does not define it; it defines compute_score",)),
    Case("reward", "a number instead of a function", scorer("compute_score = 1\n", whole=True), (NAME, "compute_score", "must be a function")),
    Case("reward", "too few parameters", scorer("def compute_score(data_source, solution_str):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "compute_score(data_source, solution_str)", "ground_truth")),
    Case("reward", "a parameter that nobody passes", scorer("def compute_score(data_source, solution_str, ground_truth, extra_info, tolerance):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "tolerance", "custom_reward_function.reward_kwargs")),
    Case("reward", "an argument that it does not take", scorer("return 0", extra={"+custom_reward_function.reward_kwargs.bonus": 1}), (f"{NAME}=compute_score: ", "bonus")),
    Case("reward", "an asynchronous function", scorer("async def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0\n", whole=True), (f"{NAME}=compute_score: ", "asynchronous", "`def`")),
    Case("reward", "an unknown reward manager", {"reward_model.reward_manager": "naiv"}, ("reward_model.reward_manager=naiv: is not registered; the nearest: naive",)),
    Case("reward", "an argument that the manager does not take", {"reward_model.reward_manager": "dapo", "+reward_model.reward_kwargs.max_len": 16}, ("reward_model.reward_kwargs.max_len=16: is not taken by the reward manager 'dapo': write max_resp_len or overlong_buffer_cfg",)),
    Case("reward", "no time to score", {"reward_model.scoring.timeout_s": 0}, ("reward_model.scoring.timeout_s=0: must be a number above 0",)),
    Case("reward", "an invalid sandbox address", {"reward_model.sandbox_fusion.url": "sandbox:8080"}, ("reward_model.sandbox_fusion.url=sandbox:8080: must be null or an address such as http://host:8080/run_code",)),
    Case("reward", "a module that cannot be imported", scorer("import no_such_module\ndef compute_score(data_source, solution_str, ground_truth, extra_info): return 0\n", whole=True, extra=NO_WORKERS), (PATH, "{at}/reward.py", "No module named 'no_such_module'"), late="alone"),
    Case("reward", "raises", scorer("return 1 / 0", extra=NO_FAILURE), ("data_source 'letters', sample ", "ground truth 'letters'", "the scorer raised ZeroDivisionError: division by zero"), late="together"),
    Case("reward", "returns None", scorer("pass", extra=NO_FAILURE), ("the scorer returned None; a scorer must return a number",), late="together"),
    Case("reward", "returns NaN", scorer("return float('nan')", extra=NO_FAILURE), ("the scorer returned nan, which is not finite",), late="together"),
    Case("reward", "returns a string", scorer("return '1'", extra=NO_FAILURE), ("the scorer returned '1'; a scorer must return a number",), late="together"),
    Case("reward", "returns a dict without a score", scorer("return {'acc': 1.0}", extra=NO_FAILURE), ("the scorer returned a dict without 'score': {'acc': 1.0}",), late="together"),
    Case("reward", "returns a list", scorer("return [1.0]", extra=NO_FAILURE), ("the scorer returned [1.0]; a scorer must return a number",), late="together"),
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
    Case("checkpoint", "no checkpoint of the critic", checkpoint(extra={"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8, "critic.model.path": "{model}"}), ("critic: the folder {at}/run/global_step_2/critic does not exist",)),
    Case("checkpoint", "resuming from HDFS", {"trainer.default_hdfs_dir": "hdfs://runs/mine"}, ("trainer.default_hdfs_dir=hdfs://runs/mine: resuming from it is not supported", "trainer.resume_mode=disable")),
    Case("checkpoint", "tensors of another model", checkpoint(), ("model_world_size_1_rank_0.pt belongs to another model: it lacks",), late="together"),
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
    Case("model", "weights of other sizes", model(config={"intermediate_size": 256}), ("tensor 'model.layers.0.mlp.gate_proj.weight' in {at}/model/model.safetensors has shape (512, 128), the model of its config.json needs (256, 128)",), late="alone"),
    Case("model", "a config.json that contradicts itself", model(config={"num_hidden_layers": 3}, extra=NO_WORKERS), ("{at}/model", "`num_hidden_layers` (3) must be equal to the number of `layer_types` (2)"), late="alone"),
    Case("model", "a missing tensor", model(without_tensor="model.norm.weight"), ("the checkpoint lacks 1 tensors of the model, the first is 'model.norm.weight'",), late="alone"),
]

CASES = [*CONFIG, *DATA, *REWARD, *CHECKPOINT, *MODEL_CASES]
