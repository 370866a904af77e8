"""Workflows, templates, Docker files, citation and changelog: they parse, and what they name exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import verl

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
LABELS = {"bug", "enhancement", "documentation"}
"""Labels that a repository has from the start."""


def load(path: Path) -> dict[str, Any]:
    """Return a YAML file; ``on`` is a key, not a boolean."""
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_workflows_are_bounded_and_may_only_read(workflow: Path) -> None:
    content = load(workflow)
    assert content["name"] and content["on"]
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        assert 0 < int(job["timeout-minutes"]) <= 120
        assert job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_actions_are_pinned_by_version(workflow: Path) -> None:
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+(\.\d+)*|[0-9a-f]{40})", step["uses"]), step["uses"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_a_command_takes_no_text_of_a_pull_request(workflow: Path) -> None:
    """Text that anybody may write reaches a shell by a variable, not as part of the command."""
    for step in steps(workflow):
        assert "${{" not in step.get("run", ""), step["run"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_commands_name_files_that_exist(workflow: Path) -> None:
    for step in steps(workflow):
        for word in step.get("run", "").split():
            if re.fullmatch(r"[\w.-]*/?[\w./-]+\.(sh|py|txt)|\.ci/run", word):
                assert (ROOT / word).is_file(), word


def test_every_workflow_is_listed() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert all(f"| `{load(path)['name']}` |" in page for path in WORKFLOWS)


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_issue_forms(form: Path) -> None:
    content = load(form)
    assert content["name"] and content["description"]
    assert set(content["labels"]) <= LABELS
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["type"] in {"textarea", "input", "dropdown", "checkboxes"} for part in fields)
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") == "true" for part in fields)


def test_dependabot_watches_folders_that_exist() -> None:
    updates = load(GITHUB / "dependabot.yml")["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "docker", "pip"}
    for update in updates:
        assert (ROOT / update["directory"].lstrip("/")).is_dir()
        assert update["schedule"]["interval"] in {"weekly", "monthly"}


def test_code_owners_own_what_exists() -> None:
    rules = [line.split() for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0][0] == "*"
    for path, *owners in rules:
        assert owners and all(owner.startswith("@") for owner in owners)
        assert path == "*" or (ROOT / path.strip("/")).is_dir(), path


@pytest.mark.parametrize("path", sorted((ROOT / "docker").glob("Dockerfile.*")), ids=name)
def test_docker_files_copy_what_exists(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split() for line in lines if line and line[0] != "#"]
    assert {words[0] for words in instructions} <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "USER", "COPY", "CMD"}
    for words in instructions:
        if words[0] == "COPY":
            sources = [word for word in words[1:-1] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), words
        if words[0] == "FROM":
            assert words[1].startswith("$") or ":" in words[1], "a base image has a version"
    if path.suffix == ".cuda":
        assert "NOT BUILT AND NOT RUN" in path.read_text()


def test_extras_of_the_docker_file_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"\.\[([\w,]+)\]", (ROOT / "docker" / "Dockerfile.cuda").read_text())
    assert named and {extra for names in named for extra in names.split(",")} <= set(extras)


def test_citation_and_changelog_name_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert citation["version"] == verl.__version__
    assert citation["license"] == "Apache-2.0"
    assert f"## {verl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_released_version_is_read_in_two_minutes() -> None:
    released = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[2:]
    assert released and all(len(section.split()) <= 400 for section in released), "new lines go below Unreleased"
