"""Module path that pickles of earlier versions name; see ``verl.utils.batch.serialization``."""

from verl.utils.batch.serialization import deserialize_single_tensor, writable

__all__ = ["deserialize_single_tensor", "writable"]
