"""Define the report's colours, and turn figures into inline SVG that follows the page's light or dark theme.

Figures are drawn once, in the light colours. Each colour in the SVG then becomes a CSS variable of the page.
"""

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = {
    "#2563a8": "#7fb2f0",
    "#c2570c": "#f2a25c",
    "#1b7f4d": "#6fcf97",
    "#7a3fa0": "#c59cf0",
    "#b3261e": "#ff8a80",
    "#0f7c8a": "#5fd0dc",
    "#8a6d00": "#e0c25a",
    "#5f6b7a": "#a9b4c2",
    "#9d2f6b": "#f28cbf",
    "#4a5fc1": "#a3b1ff",
    "#6b8e23": "#b5d56a",
    "#99582a": "#d9a679",
    "#3d405b": "#c3c6e0",
}
"""Light colour -> its counterpart on a dark page."""
HEAT = "#3f9f73"
"""Colour of the length distribution. It is an image, which CSS variables cannot reach, so it must suit both themes."""
INK = "#1c2430"
GRID = "#d5dae1"
MUTED = "#66707d"
_DARK = {INK: "#e6e9ee", GRID: "#3a424e", MUTED: "#9aa5b3"}
COLORS = list(SERIES)
VARIABLES = {light: f"--c{number}" for number, light in enumerate([*SERIES, *_DARK])}

RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "verl",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.7,
    "figure.facecolor": "none",
}


def css_variables(dark: bool) -> str:
    """Return the CSS declarations of all colours."""
    pairs = {**SERIES, **_DARK}
    return "".join(f"{VARIABLES[light]}:{pairs[light] if dark else light};" for light in pairs)


def as_svg(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as an ``svg`` element with CSS variables for colours and with ids prefixed by ``name``."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    text = re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match.group()]})", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()
