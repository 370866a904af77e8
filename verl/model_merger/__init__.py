"""A Hugging Face folder from the files that the ranks of a run have written."""

from verl.model_merger.base import MergeOptions
from verl.model_merger.merger import compare, merge

__all__ = ["MergeOptions", "compare", "merge"]
