"""The outputs of a run that trains nothing."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.trainer.config.run_config import RunConfig
from verl.trainer.run.output import RunOutput
from verl.utils.observe.attempts import ATTEMPTS_NAME, read_attempts
from verl.utils.observe.record import RunRecord, read_record

IDLE = {"training/global_step": 1.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}


@pytest.mark.parametrize("steps", [1, 6, 8])
def test_a_run_that_trains_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int) -> None:
    """After six steps, so that it can be ended, and at the end."""
    trainer = {"default_local_dir": str(tmp_path), "logger": [], "report": False}
    options = RunConfig.parse(OmegaConf.create({"trainer": trainer})).trainer

    def run(data: dict[str, Any]) -> list[int]:
        caplog.clear()
        output = RunOutput(options, OmegaConf.create({}), None, steps, lambda metrics: [])
        said = []
        for step in range(1, steps + 1):
            output.log(data, step, finished=True)
            said.append(caplog.text.count("nothing trained: all advantages are 0"))
        output.close()
        return [*said, caplog.text.count("nothing trained")]

    said = run(IDLE)
    assert said[: min(steps, 5)] == [0] * min(steps, 5)
    assert said[-1] == (2 if steps > 6 else 1) and (steps < 6 or said[5] == 1)
    assert run(IDLE | {"critic/advantages/max": 1.0})[-1] == 0


def test_a_run_that_only_validates_replaces_no_step(tmp_path: Path) -> None:
    trainer = {"default_local_dir": str(tmp_path), "logger": [], "report": False}
    options = RunConfig.parse(OmegaConf.create({"trainer": trainer})).trainer
    record = RunRecord(tmp_path, None)
    for step in (2, 3, 4):
        record.log({"x": float(step)}, step)
    (tmp_path / ATTEMPTS_NAME).write_text('{"step": 3}\n')
    for resumed in (2, None):
        output = RunOutput(options, OmegaConf.create({}), resumed, 4, lambda metrics: [], only_validates=True)
        output.log({"val": 1.0}, resumed or 0)
        output.close()
    found = read_record(record.path)
    assert list(found.items()) == [(0, {"val": 1.0}), (2, {"x": 2.0, "val": 1.0}), (3, {"x": 3.0}), (4, {"x": 4.0})]
    assert list(read_attempts(tmp_path)) == [{"step": 3}]
    assert not list(tmp_path.glob("*previous*"))
