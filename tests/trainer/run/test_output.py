"""What a run says in the terminal about a training that changes nothing."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.trainer.config.run_config import RunConfig
from verl.trainer.run.output import RunOutput

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
