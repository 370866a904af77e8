"""Log tables of validation samples to the trackers that can show them."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Sample = Sequence[Any]
"""One validation sample: (input, output, score)."""


class ValidationGenerationsLogger:
    """Sends the samples of each validation to every tracker that shows text."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.rows: list[list[Any]] = []

    def log(self, loggers: Mapping[str, Any] | Sequence[str], samples: Sequence[Sample], step: int) -> None:
        """Log the samples of one validation to those of the given backends that can show them."""
        writers = {
            "wandb": self._log_wandb,
            "vemlp_wandb": self._log_vemlp_wandb,
            "swanlab": self._log_swanlab,
            "mlflow": self._log_mlflow,
            "clearml": self._log_clearml,
        }
        for name in loggers:
            if name in writers:
                writers[name](samples, step)
            elif name == "tensorboard" and isinstance(loggers, Mapping):
                self._log_tensorboard(loggers[name].writer, samples, step)

    def _log_wandb(self, samples: Sequence[Sample], step: int) -> None:
        import wandb

        self._log_table(wandb, samples, step)

    def _log_vemlp_wandb(self, samples: Sequence[Sample], step: int) -> None:
        from volcengine_ml_platform import wandb

        self._log_table(wandb, samples, step)

    def _log_table(self, wandb: ModuleType, samples: Sequence[Sample], step: int) -> None:
        columns = ["step"]
        for number in range(1, len(samples) + 1):
            columns += [f"input_{number}", f"output_{number}", f"score_{number}"]
        self.rows.append([step, *(value for sample in samples for value in sample)])
        # A logged table cannot grow: each validation logs a new one with all rows so far.
        rows = [row for row in self.rows if len(row) == len(columns)]
        wandb.log({"val/generations": wandb.Table(columns=columns, data=rows)}, step=step)

    def _log_swanlab(self, samples: Sequence[Sample], step: int) -> None:
        import swanlab

        table = swanlab.echarts.Table()
        table.add(headers=["step", "input", "output", "score"], rows=[[step, *sample] for sample in samples])
        swanlab.log({"val/generations": table}, step=step)

    def _log_mlflow(self, samples: Sequence[Sample], step: int) -> None:
        import mlflow

        rows = [dict(zip(("input", "output", "score"), sample, strict=True)) for sample in samples]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"val_step{step}.json")
            file.write_text(json.dumps(rows, ensure_ascii=False, allow_nan=False), encoding="utf-8")
            mlflow.log_artifact(str(file))

    def _log_clearml(self, samples: Sequence[Sample], step: int) -> None:
        import clearml
        import pandas as pd

        task = clearml.Task.current_task()
        if task is not None:
            table = pd.DataFrame(samples, columns=["input", "output", "score"])
            table.insert(0, "step", step)
            task.get_logger().report_table(
                series="Validation generations", title="Validation", table_plot=table, iteration=step
            )

    def _log_tensorboard(self, writer: "SummaryWriter", samples: Sequence[Sample], step: int) -> None:
        named = enumerate(samples, 1)
        parts = [f"**sample {i}** (score {score})\n\n{given}\n\n{output}" for i, (given, output, score) in named]
        writer.add_text("val/generations", "\n\n---\n\n".join(parts), step)
        writer.flush()
