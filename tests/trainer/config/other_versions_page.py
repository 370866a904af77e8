"""Write the page about other versions: ``python -m tests.trainer.config.other_versions_page``; a test compares it."""

import re
from pathlib import Path

from verl.base_config import as_yaml
from verl.trainer.config.other_versions import ROWS, Row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "other_versions.md"
HEAD = """# Coming from another version

<!-- python -m tests.trainer.config.other_versions_page writes the tables of this page. -->

Scripts of other versions of the established project name keys that this one has under another name, does not need, or
does not have. The command knows them on the command line, in files of yours, and in `--help KEY`. It translates what it
can, says once which key it has set, and answers the rest by name. The command line wins over a file in either spelling.
`--cfg job` shows the result.

A node that is switched off (`enable: false`, `enabled: false`) or null is accepted, whatever the table says about it.
Keys of later versions that are here under the same name, such as `data.train_max_samples`, have no row: `--help KEY`
explains them.

| decision | what becomes of the key |
|---|---|
| alias | it has another name here: the command translates it |
| accepted | this version does what the value asks for; another value is refused |
| built | it is here, under the name in its row |
| feature | it is not here yet: the command stops and says what the key is |
| refused | it will not be here: the command stops and says what to write instead |

Defaults differ. `rollout.mode` is `sync` here, `rollout.calculate_log_probs`, `model.use_remove_padding`,
`megatron.use_mbridge` and `data.return_raw_chat` are false, and `rollout.max_num_seqs` is 1024. A key that needs
another default sets it: `algorithm.rollout_correction` sets `rollout.calculate_log_probs=true`, a threshold of 2.0
and no veto.
"""
_TITLES = (
    (
        "Entry points and groups of files",
        ("model_engine", "trainer.use_v1", "trainer.v1", "separate_async", "ray_kwargs", "transfer_queue"),
    ),
    ("Scores", ("reward", "sandbox_fusion", "reward_model.reward_manager")),
    ("Algorithms", ("algorithm", "distillation")),
    ("Data", ("data",)),
    ("Profiling", ("global_profiler",)),
    ("Rollout", ("skip", "actor_rollout_ref.rollout")),
    ("Models, engines and optimizers", ("critic", "model", "engine", "optim", "actor_rollout_ref")),
)


def page() -> str:
    """Return the page as the table says it."""
    rows = [row for row in ROWS if row.roots and not (row.decision == "built" and row.is_ours)]
    older = [row for row in ROWS if not row.roots]
    parts = [HEAD]
    for title, _ in _TITLES:
        if own := [row for row in rows if _title(row) == title]:
            parts.append(f"## {title}\n\n" + _table(own))
    parts.append(
        "## Older names\n\nThese are refused, with what replaces them.\n\n| key | |\n|---|---|\n"
        + "".join(f"| `{row.key}` | {_text(row.message)} |\n" for row in older)
    )
    return "\n".join(parts)


def _title(row: Row) -> str:
    if ".profiler." in row.key:
        return "Profiling"
    return next(
        title for title, tops in _TITLES if any(row.key == top or row.key.startswith(f"{top}.") for top in tops)
    )


def _table(rows: list[Row]) -> str:
    """Return the rows as a table; those that say the same of several roles stand in one line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        values = ", ".join(f"`{as_yaml(value)}`" for value in row.only or row.accepts if value not in ({}, ""))
        instead = _text(row.instead) or (f"accepted: {values}" if row.accepts and row.accepts == row.only else "")
        name = re.sub(r"\*$|\*", "...", row.key)
        key = f"`{name}`" + (f" = {values}" if row.only else "")
        lines.setdefault((row.decision, row.meaning, instead), []).append(key)
    body = "".join(
        f"| {'<br>'.join(keys)} | {decision} | {_text(meaning)} | {instead} |\n"
        for (decision, meaning, instead), keys in lines.items()
    )
    return f"| key | decision | what it is | what to write |\n|---|---|---|---|\n{body}"


def _text(text: str) -> str:
    """Return a message for a page, with keys as code."""
    if "`" in text:
        return text
    text = re.sub(r"^Write", "write", text)
    return re.sub(r"\b((?:\w+\.)*\w+=[\w<>.\[\]]+|\w+(?:\.\w+)+)", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
