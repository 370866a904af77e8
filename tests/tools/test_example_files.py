"""The tool and interaction files of the examples, and the classes on the pages, do what they say."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.calls import execute_call
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.utils.tool_registry import initialize_tools_from_config, read_tools_file

DOCS = Path(__file__).parents[2] / "docs" / "advance"
CONFIG = Path(__file__).parents[2] / "examples" / "sglang_multiturn" / "config"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("gsm8k_tool_config.yaml", "calc_gsm8k_reward"),
        ("geo3k_tool_config.yaml", "calc_geo3k_reward"),
        ("sandbox_fusion_tool_config.yaml", "code_interpreter"),
        ("search_tool_config.yaml", "search"),
        ("image_zoom_in_tool_config.yaml", "image_zoom_in_tool"),
    ],
)
def test_tools(file: str, name: str) -> None:
    (item,) = read_tools_file(str(CONFIG / "tool_config" / file))
    if "sandbox" in file:  # making it looks whether this machine can isolate code
        assert item.rest["tool_schema"]["function"]["name"] == name
        return
    (tool,) = initialize_tools_from_config(str(CONFIG / "tool_config" / file))
    assert tool.name == name


def test_servers_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG.parents[2])  # the file names the servers relative to the repository
    read_tools_file(str(CONFIG / "tool_config" / "mcp_tool_config.yaml"))


@pytest.mark.parametrize("name", ["gsm8k", "weather", "simulated_user"])
def test_interactions(name: str) -> None:
    path = CONFIG / "interaction_config" / f"{name}_interaction_config.yaml"
    assert list(initialize_interactions_from_config(str(path))) == [name]


# ---- the classes on the pages


def code_of(page: str, containing: str) -> dict[str, Any]:
    """Run the Python block of a page that holds a text, and return its names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if containing in block]
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return names


def test_a_tool_of_your_own() -> None:
    schema = yaml.safe_load(re.findall(r"```yaml\n(# tools.yaml.*?)```", (DOCS / "tools.md").read_text(), re.DOTALL)[0])
    tool_schema = OpenAIFunctionToolSchema.model_validate(schema["tools"][1]["tool_schema"])
    tool = code_of("tools.md", "class DiceTool")["DiceTool"](schema["tools"][1]["config"], tool_schema)

    async def roll(count: Any) -> Any:
        instance_id, _ = await tool.create()
        return await execute_call(tool, instance_id, {"count": count})

    first, second = (asyncio.run(roll(3)) for _ in range(2))
    assert first.response.text == second.response.text and 3 <= int(first.response.text) <= 18
    assert asyncio.run(roll("3")).outcome == "bad_arguments"


def test_an_interaction_of_your_own() -> None:
    interaction = code_of("interactions.md", "class PoliteInteraction")["PoliteInteraction"]({"tries": 2})

    async def talk(texts: list[str]) -> list[tuple[bool, float]]:
        name = await interaction.start_interaction()
        answers = [
            await interaction.generate_response(name, [{"role": "assistant", "content": text}]) for text in texts
        ]
        await interaction.finalize_interaction(name)
        return [(ended, score) for ended, _, score, _ in answers]

    assert asyncio.run(talk(["Now!", "Please."])) == [(False, 0.0), (True, 1.0)]
    assert asyncio.run(talk(["Now!", "Now!"])) == [(False, 0.0), (True, 0.0)]


def test_rows_of_an_environment() -> None:
    class Environment:
        def reset(self, *, seed: int, options: Any) -> Any:
            return f"seed {seed}", {}

    row = code_of("interactions.md", "def row_of")["row_of"](Environment(), 3)
    assert row["prompt"] == [{"role": "user", "content": "seed 3"}]
    assert row["extra_info"]["interaction_kwargs"] == {"name": "game", "seed": 3, "observation": "seed 3"}
