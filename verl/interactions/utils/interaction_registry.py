"""Make the interactions that a file lists."""

from verl.errors import WrongInput
from verl.interactions.base import BaseInteraction
from verl.utils.class_files import ClassItem, build, import_class, read_class_items
from verl.utils.json_types import JsonObject

EXAMPLE = "name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}"


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """Make the interactions of a file, by name.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    interactions: dict[str, BaseInteraction] = {}
    for name, item in read_interactions_file(interaction_config_file).items():
        interaction_class = import_class(item, BaseInteraction)  # type: ignore[type-abstract]
        config: JsonObject = {**item.config, "name": name}
        interactions[name] = build(item, lambda made=interaction_class, given=config: made(given))  # type: ignore[misc]
    return interactions


def get_interaction_class(cls_name: str) -> type[BaseInteraction]:
    """Import the class of a dotted name, for users' forks of verl and tests that import this function.

    Raises: WrongInput for any error of the import.
    """
    item = ClassItem("get_interaction_class", cls_name, {}, {})
    return import_class(item, BaseInteraction)  # type: ignore[type-abstract]


def read_interactions_file(path: str) -> dict[str, ClassItem]:
    """Read and check a file of interactions without importing their classes; return its items by name.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    items: dict[str, ClassItem] = {}
    for item in read_class_items(path, "interaction", EXAMPLE, ("name",)):
        name = item.rest.get("name")
        if name is None:
            name = default_name(item.class_name)
        if not isinstance(name, str) or not name:
            raise WrongInput(f"{item.where}.name={name!r}: write the name that rows give in interaction_kwargs.name")
        if name in items:
            raise WrongInput(f"{item.where}.name={name}: Duplicate interaction name {name!r}: write one that is free")
        items[name] = item
    return items


def default_name(class_name: str) -> str:
    """Return the name of an interaction that has none: its class without ``Interaction``, in lower case."""
    name = class_name.rpartition(".")[2]
    return (name.removesuffix("Interaction") or name).lower()
