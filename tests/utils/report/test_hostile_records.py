"""A record from anywhere: the page holds it as text, whatever it holds, and runs nothing of it."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.utils.report.__main__ import main
from verl.utils.report.live import RecordFollower, table_rows
from verl.utils.report.page import write_report

pytest.importorskip("matplotlib")

CODE = "document.documentElement.setAttribute('data-owned','1')"
ATTACKS = (
    f"<script>{CODE}</script>",
    f"</script><script>{CODE}</script>",
    f'"><img src=x onerror="{CODE}">',
    f"' onmouseover='{CODE}' autofocus onfocus='{CODE}",
    f"</pre></td></table><svg onload={CODE}>",
    f"]]><script>{CODE}</script>-->",
    f"</style></title></select><iframe srcdoc='<script>parent.{CODE}</script>'>",
    f"javascript:{CODE}",
    "{{ 7 * 7 }} {% for x in y %} $\\frac{$ \\x1b[2J \u202e \ud800 \x00 \x1b]0;owned\x07",
    "<base href=//evil.example><meta http-equiv=refresh content=0;url=//evil.example><form action=//evil.example>",
)
OWN_TAGS = set(
    "html head meta title style body header h1 h2 button dl div dt dd section ul li b a p figure figcaption svg defs "
    "g path use text tspan clippath rect image label select option table thead tbody tr th td span pre details summary "
    "script".split()
)

texts = st.sampled_from(ATTACKS) | st.text(max_size=20)
numbers = st.sampled_from([0, -1, 3, 10**400, 1e308, -1e308, 5e-324, "NaN", "Infinity", 2**53, True]) | st.floats()
values = st.recursive(
    st.none() | numbers | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
sure = st.floats(0, 10)


def often(fitting, odd=values):
    """Mostly what fits, so that the rest of the page is reached."""
    return st.one_of(fitting, fitting, fitting, odd)


reports = st.fixed_dictionaries(
    {
        "rank": often(st.integers(0, 3) | texts),
        "seconds": often(st.dictionaries(texts | st.just("update"), often(sure), max_size=3)),
        "memory": often(st.dictionaries(texts | st.just("host_gb"), often(sure), max_size=3)),
    }
)
calls = st.fixed_dictionaries(
    {"name": often(texts), "arguments": often(texts), "outcome": often(texts), "seconds": often(sure)},
    optional={"reward": often(sure)},
)
turns = st.fixed_dictionaries(
    {"role": often(st.just("assistant") | texts), "text": often(texts), "tokens": often(texts), "seconds": often(sure)},
    optional={"calls": often(st.lists(often(calls), max_size=2))},
)
samples = st.fixed_dictionaries(
    {"kind": often(texts), "prompt": often(texts), "response": often(texts), "score": often(sure)},
    optional={"tokens": often(texts), "truth": often(texts), "reward_failure": often(texts), "more": values}
    | {"turns": often(st.lists(often(turns), max_size=3))},
)
names = st.sampled_from(
    ["critic/score/mean", "timing_s/step", "timing_s/gen", "actor/kl_loss", "train/loss", "response_length/mean"]
) | st.builds("{}{}".format, st.sampled_from(["val-core/", "perf/mfu/", "perf/memory/actor/", ""]), texts)
entries = st.fixed_dictionaries(
    {"step": st.integers(-2, 9), "data": st.dictionaries(names, often(sure, numbers | values), max_size=8)},
    optional={
        "workers": often(st.dictionaries(texts | st.just("actor"), often(st.lists(reports, max_size=3)), max_size=2)),
        "samples": often(st.lists(often(samples), max_size=3)),
        "response_length": often(
            st.fixed_dictionaries({"limit": often(st.just(8)), "counts": often(st.lists(often(sure), max_size=4))})
        ),
        "phases": values,
    },
)


class Page(HTMLParser):
    """Collects what of a page could run or load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.nonces: list[str | None] = []
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        self.nonces += [given.get("nonce")] if tag == "script" else []
        self.handlers += [name for name in given if name.startswith("on") or name in ("srcdoc", "action")]
        self.links += [given[name] or "" for name in ("src", "href", "xlink:href") if name in given]


def page_of(folder: Path, rows: list[dict]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return write_report(folder).read_text()


def check(text: str) -> None:
    page = Page(text)
    assert set(page.tags) <= OWN_TAGS, set(page.tags) - OWN_TAGS
    assert not page.handlers and all(link.startswith(("#", "data:image/png")) for link in page.links)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and len(page.nonces) == 1
    assert f"script-src 'nonce-{page.nonces[0]}';" in policy.group(1) and "default-src 'none'" in policy.group(1)
    assert text.index("Content-Security-Policy") < text.index("<title>")


def full_record() -> list[dict]:
    """A record with an attack in every place."""
    rows = []
    for step in range(1, 9):
        attack = ATTACKS[step % len(ATTACKS)]
        report = {"rank": attack, "seconds": {attack: 1.0, "b": attack}, "memory": {attack: 1.0, "host_gb": attack}}
        call = {"name": attack, "arguments": attack, "outcome": attack, "seconds": attack, "reward": attack}
        turn = {"role": attack, "text": attack, "tokens": attack, "seconds": attack, "calls": [call]}
        sample = {"kind": attack, "prompt": attack, "response": attack, "score": attack, "tokens": attack}
        named = {f"{prefix}{attack}": step / 9 for prefix in ("val-core/", "perf/mfu/", "perf/memory/actor/", "")}
        rows.append(
            {
                "step": step,
                "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0, "timing_s/gen": attack, **named},
                "workers": {attack: [report, report | {"rank": 1}]},
                "samples": [sample, sample | {"truth": attack, "reward_failure": attack, "score": 1, "turns": [turn]}],
                "response_length": {"limit": attack, "counts": [attack]},
                "phases": attack,
            }
        )
    return rows


def test_an_attack_in_every_place_is_text(tmp_path):
    text = page_of(tmp_path / "</title><script>1</script>".replace("/", "\u2215"), full_record())
    check(text)
    assert text.count("&lt;script&gt;document") > 20
    assert text != write_report(tmp_path / "</title><script>1</script>".replace("/", "\u2215")).read_text()  # the nonce


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(entries, min_size=1, max_size=4))
def test_any_record_becomes_a_page_that_runs_nothing_of_it(tmp_path, rows):
    check(page_of(tmp_path, rows))
    for row in table_rows(RecordFollower(tmp_path).read()):
        assert all(cell.isprintable() for cell in row)


@pytest.mark.full
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(entries, min_size=1, max_size=6))
def test_many_records(tmp_path, rows):
    check(page_of(tmp_path, rows))


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=2000 --dump-dom"
).split()


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_no_script_of_a_record_runs_in_a_browser(tmp_path):
    """Not with the policy of the page, and not without it: what the record holds is escaped, not only forbidden."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(rows=st.lists(entries, max_size=3))
    def run(rows):
        text = page_of(tmp_path, full_record() + rows)
        assert "data-owned" not in opened(tmp_path / "report.html")
        (tmp_path / "open.html").write_text(re.sub(r"<meta http-equiv[^>]*>", "", text))
        assert "data-owned" not in opened(tmp_path / "open.html")

    (tmp_path / "owned.html").write_text(f"<html><body>{ATTACKS[2]}</body></html>")
    assert "data-owned" in opened(tmp_path / "owned.html"), "the browser runs scripts"
    run()


def opened(page: Path) -> str:
    """Return the opening tag of a page after its scripts have run."""
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={page.parent}/browser", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"<html[^>]*>", done.stdout)
    assert found
    return found.group()


def test_what_is_no_record_is_refused_in_one_line(tmp_path, capfd):
    """Also what would block a reader, and a damaged last line with nothing before it."""
    cases = {
        "pipe": os.mkfifo,
        "folder": lambda path: path.mkdir(),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path),
        "binary": lambda path: path.write_bytes(bytes(range(256))),
        "text": lambda path: path.write_text("not a record\n"),
        "empty": lambda path: path.write_text(""),
        "deep": lambda path: path.write_text("[" * 100_000),
        "list": lambda path: path.write_text("[1]\n"),
        "step": lambda path: path.write_text('{"step": 1e999, "data": {}}\n'),
        "large": lambda path: path.write_text(json.dumps({"step": 10**400, "data": {}}) + "\n"),
        "data": lambda path: path.write_text('{"step": 1, "data": [[1, 2]]}\n'),
    }
    for name, make in cases.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "metrics.jsonl")
        for given_path in (tmp_path / name, tmp_path / name / "metrics.jsonl"):
            if name == "folder" and given_path.name == "metrics.jsonl":
                continue
            assert main([str(given_path)]) == 2, name
            said = capfd.readouterr()
            assert len(said.err.splitlines()) == 1 and str(tmp_path / name) in said.err and not said.out, (name, said)
