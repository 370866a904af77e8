"""Links of the pages lead somewhere, and every page can be found."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docker/*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "recipe/**/*.md",
        "scripts/**/*.md",
        "benchmarks/*.md",
        "verl/**/*.md",
    )
    for path in ROOT.glob(pattern)
)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("https://", "mailto:"))]


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](page.md#one-heading) [b](gone.md) [c](#gone) [d](http://plain.example)\n")
    assert broken_links(page) == ["gone.md", "#gone", "http://plain.example"]


def test_files_named_in_the_docs_exist() -> None:
    missing = []
    for page in PAGES:
        for word in re.findall(
            r"`((?:verl|examples|scripts|tests|docs|benchmarks|recipe)/[\w./\-]+)`", page.read_text()
        ):
            if not (ROOT / word).exists():
                missing.append(f"{page.relative_to(ROOT)}: {word}")
    assert not missing, missing


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_of(navigation: list[Any]) -> list[str]:
    """Return the pages of a navigation, those of its sections included."""
    pages = []
    for entry in navigation:
        (value,) = entry.values()
        pages += [value] if isinstance(value, str) else pages_of(value)
    return pages


def test_navigation_lists_every_page_once() -> None:
    listed = pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )
    index = (ROOT / "docs" / "index.md").read_text()
    assert {page for page in listed if f"]({page})" not in index} == {"index.md"}


def test_the_page_of_the_trainer_names_each_key() -> None:
    page = (ROOT / "docs/trainer.md").read_text()
    keys = {}
    for name in ("ppo_trainer", "sft_trainer_engine"):
        tree: Any = yaml.safe_load((ROOT / f"verl/trainer/config/{name}.yaml").read_text())
        keys[name] = tree["trainer"].keys() - {"_target_"}
    assert keys["ppo_trainer"] | keys["sft_trainer_engine"] <= set(re.findall(r"`(\w+)`", page))
    assert set(re.findall(r"`(\w+)` ◦", page)) == keys["ppo_trainer"] & keys["sft_trainer_engine"]


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of the second level."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_of_verification_shows_what_tests_have_measured() -> None:
    measured = sections(ROOT / "tests/special_e2e/verification_results.md")
    measured["Megatron-Core"] += measured["Deviations"]
    for heading, text in sections(ROOT / "docs/verification.md").items():
        shown, known = (set(re.findall(r"\d\.\d+(?:e[-+]\d+)?", part)) for part in (text, measured[heading]))
        assert shown <= known, (heading, shown - known)
        for loss, largest in re.findall(r"^\| (\w+) \| (\S+) \|$", text, flags=re.MULTILINE):
            rows = re.findall(rf"^\| {loss}, .*? \| (\S+) \|", measured[heading], flags=re.MULTILINE)
            assert not rows or float(largest) == max(map(float, rows)), (heading, loss)


def test_the_page_of_faults_sums_up_the_table_of_cells() -> None:
    cells: dict[str, list[int]] = {}
    for line in sections(ROOT / "tests/special_e2e/fault_matrix_results.md")["Table"].splitlines():
        process = line.strip("| ").split(" |")[0]
        cells.setdefault(process, []).extend(map(int, re.findall(r"\| (\d+) s", line)))
    page = (ROOT / "docs/fault_matrix.md").read_text()
    for process, seconds in cells.items():
        if seconds:
            (row,) = re.findall(rf"^\| {process} \|.*$", page, flags=re.MULTILINE)
            shown = [int(number) for number in re.findall(r"\b(\d+)\b", row)]
            assert (min(shown), max(shown)) == (min(seconds), max(seconds)), process


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and the names whose docstrings the API pages show; the warnings of mkdocs are errors."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # of the theme, about a version that is excluded
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api" / "data" / "index.html").read_text()
    assert "DataProto" in api and "verl.protocol.data_proto.DataProto.union" in api
    assert (
        "Raises: SystemExit after a short message" in (tmp_path / "site" / "api" / "trainer" / "index.html").read_text()
    )
