"""What a run leaves behind: its record, the trackers, the display of its progress and the picture of its curves."""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.ppo.checkpoint import run_folder
from verl.trainer.ppo.progress import Progress
from verl.utils.console import get_console
from verl.utils.curves import draw_curves
from verl.utils.run_record import RunRecord
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

logger = logging.getLogger(__name__)


class RunOutput:
    """Publish the metrics of a run everywhere; ``close`` draws the picture."""

    def __init__(self, config: Any, resumed_step: int | None, total_steps: int) -> None:
        """Open the outputs of a run that continues after ``resumed_step``, None where it starts from scratch."""
        trainer = config.trainer
        self.folder = run_folder(config)
        self.record = RunRecord(self.folder, resumed_step)
        self.tracking = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=list(trainer.logger) if not isinstance(trainer.logger, str) else trainer.logger,
            config=OmegaConf.to_container(config, resolve=True),
        )
        self.generations = ValidationGenerationsLogger(trainer.project_name, trainer.experiment_name)
        self.progress = Progress(total_steps, resumed_step or 0)
        if resumed_step is not None:
            get_console().info("resumed after step %d of %d", resumed_step, total_steps)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Publish metrics that are not those of a whole step."""
        self.record.log(metrics, step)
        self.tracking.log(metrics, step)
        self.progress.note(metrics)

    def step(self, metrics: Mapping[str, Any], step: int) -> None:
        """Publish the metrics of a finished step."""
        self.log(metrics, step)
        self.progress.update(step, metrics)

    def log_generations(self, rows: list[tuple[str, str, float]], step: int) -> None:
        """Show validation samples in the trackers that can."""
        self.generations.log(self.tracking.logger, rows, step)

    def close(self, finished: bool) -> None:
        """Close the outputs, and draw the curves of a run that was not broken off."""
        self.progress.close()
        self.tracking.finish()
        if not finished or not self.record.steps:
            return
        try:
            get_console().info("curves: %s", draw_curves(self.folder))
        except ImportError as error:
            logger.warning("no picture of the curves: %s; pip install matplotlib", error)
