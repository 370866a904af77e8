"""Spans of several processes become one file in the Chrome trace format."""

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from verl.single_controller.base.worker_group import Manager
from verl.trainer.ppo.run_records import Timelines
from verl.utils.observe import timeline
from verl.utils.observe.timeline import Clock, Part, Span

HERE = Clock("host", wall=1000.0, monotonic=50.0)


@pytest.fixture(autouse=True)
def nothing_recorded():
    yield
    timeline.take("")


def events(parts, **only):
    trace = timeline.chrome_trace(parts, HERE, step=7)
    return [each for each in trace["traceEvents"] if all(each.get(name) == value for name, value in only.items())]


def names_of(parts):
    return {each["pid"]: each["args"]["name"] for each in events(parts, ph="M", name="process_name")}


def tracks_of(trace):
    """Return the spans of each track, in order."""
    tracks = {}
    for each in trace["traceEvents"]:
        if each["ph"] == "X":
            tracks.setdefault((each["pid"], each["tid"]), []).append(each)
    return {track: sorted(spans, key=lambda each: (each["ts"], -each["dur"])) for track, spans in tracks.items()}


def check_nesting(trace):
    """Within a track, spans are nested or one after the other: the format knows nothing else."""
    for spans in tracks_of(trace).values():
        ends = []
        for each in spans:
            end = each["ts"] + each["dur"]
            while ends and ends[-1] <= each["ts"] + 1e-3:  # numbers are rounded to a nanosecond
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, each
            ends.append(end)


def test_spans_of_tasks_keep_their_group_and_what_ended_them():
    async def tool(name):
        with timeline.span(name, "tool", on=f"tool {name}", arguments="1+1") as shown:
            await asyncio.sleep(0.01)
            shown["outcome"] = "ok"

    async def trajectory(number):
        with timeline.grouped(f"t{number}"), timeline.span("trajectory"):
            await asyncio.gather(tool("add"), tool("add"))

    async def run():
        with timeline.span("step"):
            await asyncio.gather(*(trajectory(number) for number in range(3)))

    asyncio.run(run())
    assert timeline.take("trainer") is None, "nobody has asked to record"
    timeline.start()
    asyncio.run(run())
    with pytest.raises(KeyError), timeline.span("lost"):
        raise KeyError("x")
    part = timeline.take("trainer")
    assert timeline.take("trainer") is None
    assert [each.group for each in part.spans if each.name == "add"] == ["t0", "t0", "t1", "t1", "t2", "t2"]
    assert part.spans[-1].args == {"outcome": "KeyError"}
    trace = timeline.chrome_trace([part], part.clock, 7)
    check_nesting(trace)
    names = names_of([part])
    assert list(names.values()) == ["trainer", "tool add"]
    by_process = {
        name: [s for (p, _), spans in tracks_of(trace).items() if p == pid for s in spans]
        for pid, name in names.items()
    }
    assert len(by_process["trainer"]) == 1 + 3 + 6 + 1 and len(by_process["tool add"]) == 6
    # Three trajectories at the same time have a track each, and one more for their second call.
    assert len({each["tid"] for each in by_process["trainer"]}) == 1 + 3 * 2


def test_clocks_of_other_hosts_are_aligned_by_their_wall_time():
    same = Part("same", Clock("host", wall=2000.0, monotonic=60.0), [Span("b", 52.0, 53.0)])
    other = Part("other", Clock("far", wall=1001.0, monotonic=7.0), [Span("c", 8.0, 9.0)])
    own = Part("trainer", HERE, [Span("a", 51.0, 54.0)])
    starts = {each["name"]: each["ts"] for each in events([own, same, other], ph="X")}
    assert starts == {"a": 0.0, "b": 1e6, "c": pytest.approx(1e6)}
    assert timeline.chrome_trace([own], HERE, 7)["otherData"] == {"step": 7, "started_unix_s": 1001.0}


def test_requests_belong_to_their_server_and_are_counted(monkeypatch):
    timeline.start()
    now = iter([10.0, 10.0])
    monkeypatch.setattr(timeline.time, "monotonic", lambda: next(now))
    for begin in (4.0, 5.0):
        with timeline.grouped(f"t{begin}"):
            timeline.add_request("server 0", begin, queue_s=1.0, sample_s=3.0, request="r")
    monkeypatch.undo()
    part = timeline.take("agent loops 0")
    names = names_of([part])
    assert list(names.values()) == ["server 0"], "the caller has its own span of a request"
    spans = [(each.name, each.start, each.end) for each in part.spans]
    # The first one waited for 6 s, of which the server knows 4: a second each way.
    assert spans == [("queue", 5.0, 6.0), ("sample", 6.0, 9.0), ("queue", 5.5, 6.5), ("sample", 6.5, 9.5)]
    counts = [(each["ts"] / 1e6, each["args"]) for each in events([part], ph="C")]
    assert counts[0] == (0.0, {"queue": 1, "sample": 0}) and counts[-1] == (4.5, {"queue": 0, "sample": 0})
    assert (0.5, {"queue": 2, "sample": 0}) in counts and (1.5, {"queue": 0, "sample": 2}) in counts


def test_lanes_are_used_again():
    spans = [Span("t", start, start + 2.0, group=str(start)) for start in range(10)]
    lanes = timeline.lanes_of(spans)
    assert len(lanes) == 2 and all(a.end <= b.start for lane in lanes for a, b in pairwise(lane))


def test_the_file_is_whole_and_strict_json(tmp_path):
    part = Part("trainer", HERE, [Span("score", 1.0, 2.0, args={"score": float("nan"), "text": "\ud800" + "x" * 500})])
    for step in (10, 2):
        timeline.write_timeline(timeline.timeline_path(tmp_path, step), [part], HERE, step)
    found = timeline.timelines_of(tmp_path)
    assert [path.name for path in found] == ["step_2.json", "step_10.json"]
    read = json.loads(found[0].read_text(), parse_constant=lambda name: pytest.fail(name))
    (shown,) = [each["args"] for each in read["traceEvents"] if each["ph"] == "X"]
    assert shown["score"] == "NaN" and len(shown["text"]) < 400


def test_only_chosen_steps_are_recorded_and_a_new_run_removes_old_files(tmp_path):
    for step in (1, 3):
        timeline.write_timeline(timeline.timeline_path(tmp_path, step), [], HERE, step)
    started = []
    groups = {"actor": SimpleNamespace(start_timeline=lambda: started.append(True)), "of a fork": Manager()}
    timelines = Timelines([2], tmp_path, resumed_step=1)
    assert [path.name for path in timeline.timelines_of(tmp_path)] == ["step_1.json"]
    for step in (1, 2, 3):
        timelines.begin(step, groups)
        assert timeline.is_recording() == (step == 2)
        with timeline.span("gen"):
            pass
        path = timelines.finish(step, [Part("actor rank 0", HERE, [Span("update", 50.0, 51.0)])])
        assert (path is not None) == (step == 2)
    assert started == [True]
    names = {each["name"] for each in json.loads(timeline.timeline_path(tmp_path, 2).read_text())["traceEvents"]}
    assert {"gen", "update"} < names
    Timelines(None, tmp_path, resumed_step=None)
    assert not timeline.timelines_of(tmp_path)
