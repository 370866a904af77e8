"""Draw the curves of a run as one picture: ``python -m verl.utils.observe.curves RUN_DIR``."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base_config import one_line
from verl.utils.observe.console import get_console
from verl.utils.observe.record import read_shaped, record_of
from verl.utils.report.flags import Entries
from verl.utils.report.panels import (
    KL_METRICS,
    MISMATCH_METRICS,
    PANELS,
    Panel,
    label_axes,
    legend_columns,
    lines_of,
    logarithmic,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_NAME = "curves.png"


def draw_curves(run_dir: str | Path, picture: str | Path | None = None) -> Path:
    """Draw reward, validation, KL and mismatch, and step time of a run; return the path of the picture.

    Raises: FileNotFoundError if the folder holds no record, ValueError if the record is empty, or if the picture
        cannot be written.
    """
    source = record_of(run_dir)
    entries = read_shaped(source)
    if not entries:
        raise ValueError(f"{source} holds no step yet: give the folder of a run that has finished a step")
    target = Path(picture) if picture else Path(run_dir, PICTURE_NAME)
    unfinished = target.with_name(f".{target.name}")  # the suffix names the format
    try:
        curve_figure(entries).savefig(unfinished, dpi=110)
        unfinished.replace(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"{target}: {error}: write the picture to a .png file in a folder that exists") from error
    return target


def curve_figure(entries: Entries) -> "Figure":
    """Return the four charts of a run as one figure, each with its legend below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # names come from the record
        figure = Figure(figsize=(13, 10), layout="constrained")
        for panel, ax in zip(_CURVES, figure.subplots(2, 2).flat, strict=True):
            panel.draw(ax, entries)
            label_axes(ax, panel, entries)
            ax.grid(alpha=0.3)
            if ax.has_data():
                handles, labels = ax.get_legend_handles_labels()
                below = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 4.5, "frameon": False}
                ax.legend(handles, labels, ncols=legend_columns(labels), fontsize=8, **below)
            else:
                missing = f"the run logged no data for {panel.name}"
                ax.text(0.5, 0.5, missing, ha="center", va="center", transform=ax.transAxes, color="gray")
    return figure


_OF_REPORT = {panel.name: panel for panel in PANELS}


def _validation(ax: "Axes", entries: Entries) -> None:
    """Draw the validation on an axis that shows at least 0 to 1, the range of an accuracy."""
    _OF_REPORT["validation"].draw(ax, entries)
    if ax.has_data():
        ax.set_ylim(bottom=min(-0.02, ax.get_ylim()[0]), top=max(1.02, ax.get_ylim()[1]))


_kl_and_mismatch = lines_of(KL_METRICS | MISMATCH_METRICS, logarithmic, absolute=True)
_CURVES = (
    _OF_REPORT["reward"],
    _OF_REPORT["validation"]._replace(draw=_validation),
    Panel("KL and mismatch", "KL divergence and train/rollout mismatch", "nats per token, or gap", _kl_and_mismatch),
    _OF_REPORT["times"],
)


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture of a run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", help="trainer.default_local_dir of the run")
    parser.add_argument("--output", help=f"picture to write (default: RUN_DIR/{PICTURE_NAME})")
    given = parser.parse_args(arguments)
    try:
        get_console().info("curves: %s", draw_curves(given.run_dir, given.output))
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
