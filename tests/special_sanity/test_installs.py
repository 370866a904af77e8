"""The documented installs agree with each other: pages, requirement files, images and scripts, without an index."""

import json
import re
import zipfile
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

from scripts import resolve_installs
from scripts.resolve_installs import INSTALLS, Resolved, bounds_of, image_cuda, problems, project
from tests.special_sanity.test_docs import PAGES
from verl.utils.doctor.checks import OLDEST_DRIVER

ROOT = Path(__file__).parents[2]
FILES = [*PAGES, *ROOT.glob("docker/*"), *ROOT.glob("scripts/*.sh"), ROOT / "verl/utils/doctor/checks.py"]
TEXTS = {path: path.read_text() for path in FILES}
INSTALL = (ROOT / "docs/install.md").read_text()
PINS = {"vllm": ["torch==2.13.0", "cuda-toolkit[cublas]==13.0.2"], "sglang": ["torch==2.14.1", "transformers==5.19.0"]}
"""What the newest allowed engines pin; a release that allows others changes it."""


def test_extras_that_a_command_names_are_those_of_the_project() -> None:
    extras = project()["optional-dependencies"]
    named = {(path.name, extra) for path, text in TEXTS.items() for extra in extras_in(text)}
    assert {"vllm", "sglang", "mcore", "gpu", "cpu"} <= {extra for _, extra in named}
    assert not [each for each in named if each[1] not in extras]
    listed = re.findall(r"^\| `(\w+)` \|", INSTALL.partition("## Extras")[2].partition("##")[0], flags=re.MULTILINE)
    assert sorted(listed) == sorted(extras)


def extras_in(text: str) -> set[str]:
    lists = re.findall(r"(?:-e [\"']?\.|verl)\[([\w,]+)\]", text)
    return {extra for found in lists for extra in found.split(",")}


def test_no_command_asks_for_two_engines_in_one_environment() -> None:
    """Each pins a torch of its own, and two builds of vLLM overwrite each other."""
    for path, text in TEXTS.items():
        for extras in re.findall(r"\[([\w,]+)\]", text):
            assert len({"vllm", "sglang", "cpu"} & {*extras.split(",")}) < 2, (path.name, extras)


def test_every_bound_on_a_page_is_that_of_the_project() -> None:
    declared = [*project()["dependencies"], *(x for each in project()["optional-dependencies"].values() for x in each)]
    bounds = {Requirement(text).name: Requirement(text).specifier for text in declared}
    for path, text in TEXTS.items():
        for name, written in re.findall(r"install [^\n]*?[\"' ]([a-z][\w-]+)((?:[<>]=?[\d.]+,?){2})", text):
            if name in bounds:
                assert Requirement(name + written.rstrip(",")).specifier == bounds[name], path.name


@pytest.mark.parametrize(("row", "package"), [("torch", "torch"), ("transformers", "transformers")])
def test_the_table_of_versions_has_the_bounds_of_the_project(row: str, package: str) -> None:
    (allowed,) = re.findall(rf"^\| {row} \| ([\d.]+) to ([\d.]+) \|", INSTALL, flags=re.MULTILINE)
    first, beyond = sorted(each.version for each in bounds_of(package).specifier)
    assert allowed[0] == first and allowed[1].split(".")[:-1] == beyond.split(".")[:-1]
    assert int(allowed[1].split(".")[-1]) + 1 == int(beyond.split(".")[-1])


@pytest.mark.parametrize("engine", PINS)
def test_what_an_engine_pins_lies_within_the_bounds(engine: str) -> None:
    for pin in map(Requirement, PINS[engine]):
        if pin.name in ("torch", "transformers"):
            version = next(iter(pin.specifier)).version
            assert bounds_of(pin.name).specifier.contains(version)
            assert f"{pin.name} {version}" in INSTALL or pin.name == "transformers"


def test_the_image_has_the_cuda_of_torch_and_the_pages_its_driver() -> None:
    """The image, the pages and the doctor name one major version, and the driver that it needs."""
    major = image_cuda().split(".")[0]
    assert f"CUDA {major}.0" in INSTALL and f"CUDA {major}.0" in TEXTS[ROOT / "docker/README.md"]
    driver = OLDEST_DRIVER[major].split(".")[0]
    for path in ("docs/install.md", "docker/README.md", "docker/Dockerfile.cuda"):
        assert re.search(rf"driver of (version )?{driver} or newer", (ROOT / path).read_text()), path


def test_the_script_resolves_every_install_for_gpus() -> None:
    """Those of the page and of the image; ``gpu`` compiles, and ``cpu`` is no install for GPUs."""
    lines = [*INSTALL.splitlines(), *TEXTS[ROOT / "docker/Dockerfile.cuda"].splitlines()]
    documented = {frozenset(extras_in(line)) for line in lines if "pip install" in line} - {frozenset()}
    asked = {frozenset(extras_in(" ".join(words))) for words in INSTALLS.values()}
    assert {each for each in documented if not each & {"gpu", "cpu"}} <= asked


def report(torch: str, *needs: str) -> Resolved:
    found = [("torch", torch, list(needs)), ("transformers", "5.19.0", [])]
    install = [{"metadata": {"name": name, "version": v, "requires_dist": needs}} for name, v, needs in found]
    return Resolved.read(json.loads(json.dumps({"install": install})))


def test_what_the_script_refuses() -> None:
    image = image_cuda()
    assert not list(problems(report("2.13.0", f"cuda-toolkit[cudart,nvrtc]=={image} ; platform_system == 'Linux'")))
    older = report("2.13.0", "filelock", "nvidia-cuda-runtime-cu12==12.9.79; platform_system == 'Linux'")
    assert list(problems(older)) == [f"torch asks for CUDA 12.9.79, and docker/Dockerfile.cuda has {image}"]
    (beyond,) = problems(report("2.99.0", f"cuda-toolkit=={image}"))
    assert beyond.startswith("torch 2.99.0 is outside") and "pyproject.toml" in beyond
    (on_cpu,) = problems(report("2.13.0"))
    assert on_cpu.startswith("torch asks for CUDA None")


def test_a_resolution_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*asked: object) -> Resolved:
        raise RuntimeError("ERROR: ResolutionImpossible")

    monkeypatch.setattr(resolve_installs, "install_pip", lambda folder: folder)
    monkeypatch.setattr(resolve_installs, "resolve", fail)
    assert resolve_installs.main(["--only", "vLLM", "--out", str(tmp_path)]) == 1
    assert "vLLM: ERROR: ResolutionImpossible" in capsys.readouterr().err


def write_wheel(folder: Path, version: str) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        about = f"torch-{version}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{Path(str(wheel.filename)).name}">torch</a>')


def test_wheels_of_the_machine_do_not_answer_for_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip prefers 2.13.0+cpu to 2.13.0, which the index has."""
    index, added, configured = (tmp_path / name for name in ("index/torch", "added", "configured"))
    write_wheel(index, "2.13.0")
    write_wheel(added, "2.13.0+cpu")
    write_wheel(configured, "2.13.1+cpu")
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {configured}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(added))
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    found = resolve_installs.resolve(["torch"], tmp_path / "report.json", Path(pip.__file__).parent)
    assert found.versions == {"torch": "2.13.0"}
