"""The examples of the page on the single controller run, and print what their comments say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "single_controller.md"


def give_back(namespace: dict[str, Any]) -> None:
    """End the workers of the examples and free their places, which other tests need."""
    from ray.util.placement_group import remove_placement_group

    for name in {"group", "shared"} & namespace.keys():
        namespace[name].kill()
    for name in {"pool", "shared_pool"} & namespace.keys():
        for placement in namespace[name].pgs or []:
            remove_placement_group(placement)


@pytest.mark.usefixtures("ray_cluster")
def test_the_examples_print_what_the_page_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    said = [line.split("  # ")[1] for block in blocks for line in block.splitlines() if line.startswith("print(")]
    code = "\n".join(blocks).replace("\nray.shutdown()\n", "\n")  # the cluster belongs to all tests
    namespace: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, str(PAGE), "exec"), namespace)
    finally:
        give_back(namespace)
    printed = output.getvalue().splitlines()
    assert len(said) == len(printed) == 8
    for line, comment in zip(printed, said, strict=True):
        assert comment == line or comment.startswith(f"{line}: "), (line, comment)
