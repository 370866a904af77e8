"""Data sets and samplers as the ``data`` node of the config names them."""

from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.sampler import SeededRandomSampler
from verl.utils.import_utils import load_extern_type


class DatasetClassError(ValueError, TypeError):
    """A class named by the config is not of the kind that is needed there."""


class SamplerSettingError(ValueError, AssertionError):
    """A custom sampler cannot be used as configured."""


def load_class(config: Mapping[str, Any] | None, key: str, base: type, names: tuple[str, str]) -> type | None:
    """Load the class that a node names by file and name; None where it names none.

    Args:
        key: dotted key of the node.
        base: what the class must be derived from.
        names: the two keys in the node that hold file and class name.

    Raises: ValueError naming the key.
    """
    path = (config or {}).get(names[0])
    if not path:
        return None
    name = (config or {}).get(names[1])
    if not name:
        raise ValueError(f"{key}.{names[1]} must name a class in {path!r}, got {name!r}")
    found = load_extern_type(path, name)
    if not isinstance(found, type) or not issubclass(found, base):
        raise DatasetClassError(f"{key}.{names[1]}={name!r} in {path!r} must be a class derived from {base.__name__}")
    return found


def create_rl_dataset(
    data_paths: str | list[str],
    data_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    is_train: bool = True,
) -> Dataset:
    """Build the data set of prompts: a custom class, one that generates rows (training only), or ``RLHFDataset``."""
    cls: type | None = load_class(data_config.get("custom_cls"), "data.custom_cls", Dataset, ("path", "name"))
    if cls is None and is_train and (data_config.get("datagen") or {}).get("path"):
        # verl.experimental stands above this module: loaded by name, only where the config asks for it
        cls = load_extern_type("pkg://verl.experimental.dynamic_dataset.dynamicgen_dataset", "DynamicGenDataset")
    return (cls or RLHFDataset)(data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config)


def create_rl_sampler(data_config: Mapping[str, Any], dataset: Sized) -> Sampler:
    """Build the training sampler: a custom class, a seeded permutation per epoch, or the order of the file."""
    node = data_config.get("sampler")
    if node and node.get("class_path"):
        abstract = load_extern_type("pkg://verl.experimental.dataset.sampler", "AbstractSampler")
        cls = load_class(node, "data.sampler", abstract, ("class_path", "class_name"))
        assert cls is not None
        if data_config.get("dataloader_num_workers", 8) != 0:
            raise SamplerSettingError(
                "data.dataloader_num_workers must be 0 with data.sampler, since workers fetch rows ahead of what the "
                f"sampler has learnt; got {data_config.get('dataloader_num_workers', 8)}"
            )
        return cls(data_source=dataset, data_config=data_config)
    if data_config.get("shuffle", True):
        return SeededRandomSampler(dataset, data_config.get("seed"))
    return SequentialSampler(dataset)
