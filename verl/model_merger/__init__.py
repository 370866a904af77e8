"""Merge the sharded checkpoint of a run into a Hugging Face folder."""

from verl.model_merger.base import MergeOptions as MergeOptions
from verl.model_merger.merger import compare as compare
from verl.model_merger.merger import merge as merge
