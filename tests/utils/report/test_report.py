"""The report page is complete, self-contained, and escapes hostile model output."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.utils.observe.tracking import ValidationGenerationsLogger
from verl.utils.report.__main__ import main
from verl.utils.report.page import MAX_SAMPLE_STEPS, render, write_report
from verl.utils.report.panels import HEAT, MAX_POINTS, expected_panels, thin

pytest.importorskip("matplotlib")
HOSTILE = "</pre><script>alert('x')</script><img src=http://example.org/a.png>"


class Page(HTMLParser):
    """Collects the tags, ids, links and rows of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.rows = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("src", "href", "xlink:href") if name in given]
        self.rows += "data-kind" in given


@pytest.fixture(scope="module")
def page(records):
    entries = records.changed("weight_sync/versions_behind", lambda step: 1.0 if step == 12 else None)
    sample = {"kind": "best", "prompt": "1 + 1 =", "response": HOSTILE, "score": 1.0, "tokens": 3, "truth": "2"}
    failed = sample | {"kind": "worst", "reward_failure": "timed out <b>", "score": 0.0}
    for entry in entries.values():
        entry["samples"] = [sample, failed]
    call = {"name": "calculator", "arguments": "{}", "outcome": "timeout", "seconds": 2.0, "reward": 0.25}
    turn = {"role": "assistant", "text": "call", "tokens": 3, "seconds": 0.1, "calls": []}
    answer = turn | {"role": "tool", "text": HOSTILE, "calls": [call]}
    entries[max(entries)]["samples"] = [sample, failed | {"turns": [turn, answer, turn]}]
    return render(entries, "a <run>")


def test_every_picture_is_there_with_axes_and_units(page, records):
    for panel in expected_panels(records.healthy()):
        figure = re.search(rf'<figure id="{panel.name}">.*?</figure>', page, re.DOTALL)
        assert figure, panel.name
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure.group())
        assert {panel.title, panel.unit, "training step"} <= set(texts)
        assert len(texts) > 8 and not any("$" in text for text in texts)  # numbers along the axes, as they are read
    assert re.search(r"from step 12</a>: step 12 sampled with weights", page)
    assert "stale weights, step 12" in re.search(r'<figure id="mismatch">.*?</figure>', page, re.DOTALL).group()


def test_timelines_of_the_run_have_links(tmp_path, records):
    records.write(tmp_path, records.healthy())
    (tmp_path / "timeline").mkdir()
    for step in (10, 2):
        (tmp_path / "timeline" / f"step_{step}.json").write_text("{}")
    links = [link for link in Page(write_report(tmp_path).read_text()).links if "timeline" in link]
    assert links == ["timeline/step_2.json", "timeline/step_10.json"]
    other = write_report(tmp_path, tmp_path.parent / "elsewhere.html")
    assert f"{tmp_path.name}/timeline/step_2.json" in Page(other.read_text()).links


def test_a_trajectory_has_its_turns_and_the_link_to_them(page, records):
    (name,) = re.findall(r'href="#(trajectory-[^"]+)">3 turns, 1 tool calls</a>', page)
    assert name == f"trajectory-{max(records.healthy())}-2"
    shown = re.search(rf'<details class="trajectory" id="{name}".*?</details>', page, re.DOTALL).group()
    assert re.findall(r'<div class="(turn[^"]*)"><b>(\w+)</b>', shown) == [
        ("turn", "prompt"), ("turn sampled", "assistant"), ("turn", "tool"), ("turn sampled", "assistant"),
    ]  # fmt: skip
    assert 'class="call failure">calculator {}: timeout, 2 s, reward 0.25</span>' in shown


def test_nothing_is_loaded_from_elsewhere_and_nothing_of_a_response_is_run(page):
    parsed = Page(page)
    assert "default-src 'none'" in page
    assert all(link.startswith(("#", "data:image/png")) for link in parsed.links), parsed.links
    assert parsed.tags.count("script") == 1 and "img" not in parsed.tags
    assert page.count("&lt;script&gt;alert(") == parsed.rows and "timed out &lt;b&gt;" in page
    assert "<title>a &lt;run&gt;: report</title>" in page
    assert len(parsed.ids) == len(set(parsed.ids))


def test_colours_follow_the_theme(page):
    """Pictures use only variables that both themes define; the key of the one image is the exception."""
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", pictures)) == {HEAT}
    used = set(re.findall(r"var\((--c\d+)\)", pictures))
    light, *dark = re.findall(r":root[^{]*\{([^}]*)\}", page)
    assert len(used) > 5 and len(dark) == 2
    for declarations in (light, *dark):
        assert used <= set(re.findall(r"(--c\d+):", declarations))


def test_a_long_run_is_thinned(records, monkeypatch):
    points = [(step, float(step % 7)) for step in range(10_000)]
    steps, means, lows, highs = thin(points)
    assert len(steps) <= MAX_POINTS and min(lows) == 0 and max(highs) == 6
    assert means[0] == sum(step % 7 for step in range(25)) / 25 and steps[0] == 12
    entries = records.healthy(steps=60)
    for entry in entries.values():
        sample = {"kind": "best", "prompt": "p", "response": "r", "score": 1.0, "tokens": 3}
        entry["samples"] = [sample]
    monkeypatch.setattr("verl.utils.report.page.draw_panels", lambda entries, flags: {})
    assert Page(render(entries, "x")).rows == MAX_SAMPLE_STEPS


def test_from_the_command_line(records, tmp_path, capsys):
    records.write(tmp_path, {1: {"data": {"critic/score/mean": 0.5}}})
    assert main([str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "holds no samples" in page and "Trends are judged from 6 steps on" in page
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert main([str(tmp_path), "--output", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"page.html", "report.html"}
    assert main([str(tmp_path), "--output", str(tmp_path / "metrics.jsonl" / "page.html")]) == 2  # below a file
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step yet"):
        write_report(tmp_path)


def test_a_run_that_only_validates(records, tmp_path):
    records.write(tmp_path, {0: {"data": {"val-core/x/acc/mean@1": 0.25}}})
    page = write_report(tmp_path).read_text()
    assert "<dt>x/acc/mean@1</dt><dd>0.250</dd>" in page and '<figure id="validation">' in page
    assert page.count("<figure") == 1 and "no training step" in page


def test_a_supervised_run_has_pictures_of_its_own(records, tmp_path):
    memory = [{"rank": 0, "seconds": {"train_batch": 0.5}, "memory": {"host_gb": 1.0}}]
    steps = {
        step: {
            "data": {
                "train/loss": 2.0 / step,
                "val/loss": 2.5 / step,
                "train/grad_norm": 1.0,
                "train/mfu": 0.3,
                "perf/throughput": 900.0,
                "timing_s/step": 0.5,
            },
            "workers": {"trainer": memory},
        }
        for step in range(1, 9)
    }
    records.write(tmp_path, steps)
    page = write_report(tmp_path).read_text()
    drawn = set(re.findall(r'<figure id="(\w+)"', page))
    assert drawn == {"loss", "gradient", "times", "throughput", "mfu", "memory"}
    for step in steps.values():
        step["data"] |= {"train/global_tokens": 500.0, "train/computed_tokens": 300.0}
    records.write(tmp_path / "sharing", steps)
    assert '<figure id="computed">' in write_report(tmp_path / "sharing").read_text()
    assert "Time of calls over the ranks (one worker)" in page
    assert "Supervised training samples no responses" in page
    assert "<dt>loss, training</dt><dd>2.000 → 0.250</dd>" in page and "No problems found" in page


def test_a_run_ends_with_a_report(tmp_path, capsys, caplog, monkeypatch):
    """Also one that is broken off, and never one that hides why."""
    from verl.trainer.config.run_config import TrainerConfig
    from verl.trainer.run import output as run

    def output(folder, report=True):
        options = TrainerConfig(
            project_name="p",
            experiment_name="e",
            logger=[],
            default_local_dir=str(folder),
            report=report,
            prometheus=False,
        )
        return run.RunOutput(options, OmegaConf.create({}), None, 2, lambda metrics: [])

    first = output(tmp_path / "a")
    details = {"response_length": {"limit": 4, "counts": [1, 0]}}
    first.log({"critic/score/mean": 0.5, "timing_s/step": 1.0}, 1, details, finished=True)
    first.close(curves=False)
    assert (tmp_path / "a" / "report.html").exists() and not (tmp_path / "a" / "curves.png").exists()
    second = output(tmp_path / "b", report=False)
    second.log({"val-core/x/acc/mean@1": 0.5}, 0)
    second.close(curves=True)
    assert not (tmp_path / "b" / "report.html").exists() and (tmp_path / "b" / "curves.png").exists()
    third_party = SimpleNamespace(finish=lambda: None)  # has no table, where samples would go
    generations = ValidationGenerationsLogger("p", "e")
    monkeypatch.setattr(generations, "_log_table", lambda *given: third_party.log)
    run.log_generations(generations, {"wandb": third_party}, [("a", "b", 1.0)], 3)
    assert "'wandb' did not take the validation samples of step 3" in caplog.text
    monkeypatch.setattr(run.RolloutTraceConfig, "finish", lambda: SimpleNamespace().missing)
    monkeypatch.setattr(run, "write_report", lambda folder: SimpleNamespace().missing)
    third = output(tmp_path / "c")
    third.log({"x": 1.0}, 0)
    third.close(curves=False)
    assert "cannot write the report" in caplog.text and "some traces were not sent" in caplog.text
