"""Merge the sharded checkpoint of a run into a Hugging Face folder."""

from verl.model_merger.base import MergeOptions
from verl.model_merger.merger import compare, merge

__all__ = ["MergeOptions", "compare", "merge"]
