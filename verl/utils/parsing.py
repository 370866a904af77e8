"""Parse untrusted JSON and YAML: any problem raises one kind of error, and parsing always ends."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

MOST_YAML_VALUES = 100_000
"""Most values of a YAML file, with each alias counted as the values that it stands for."""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; ``options`` go to ``json.loads``.

    Raises: ValueError, also for text that is nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document of plain values.

    Raises: ValueError, also for text that is nested too deeply, and for aliases that stand for too many values.
    """
    import yaml

    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_YAML_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_YAML_VALUES} values")
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, LookupError, AttributeError, TypeError) as error:  # a tag whose text has no such value
        raise ValueError(str(error)) from error
    finally:
        if loader is not None:
            loader.dispose()


def _num_values(node: "yaml.Node", counts: dict[int, int]) -> int:
    """Return the values of a node with all aliases written out. Raises: ValueError for a value that holds itself."""
    if id(node) in counts:
        if not counts[id(node)]:
            raise ValueError(f"line {node.start_mark.line + 1} holds a value that holds itself")
        return counts[id(node)]
    counts[id(node)] = 0  # until it is known
    parts = node.value if isinstance(node.value, list) else []
    children = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    counts[id(node)] = 1 + sum(_num_values(each, counts) for each in children)
    return counts[id(node)]
