"""The check that an engine turns images and videos into the tokens that training sees."""

from collections.abc import Sequence

from verl.protocol import DataProto
from verl.workers.rollout.base import padded_token_ids

PROCESSOR_KEYS = {"vllm": "engine_kwargs.vllm.mm_processor_kwargs", "sglang": "engine_kwargs.sglang.mm_process_config"}
"""The key below ``actor_rollout_ref.rollout`` for arguments of the processor, of engine and data set alike."""


def check_expansion(prompts: DataProto, expanded: Sequence[Sequence[int] | None], engine: str) -> None:
    """Check that the engine saw the same tokens as training sees.

    Args: ``expanded`` are the prompts as the engine saw them; None for text.
    Raises: RuntimeError naming the row.
    """
    if all(tokens is None for tokens in expanded):
        return
    for row, (tokens, due) in enumerate(zip(expanded, padded_token_ids(prompts), strict=True)):
        if tokens is not None and list(tokens) != due:
            raise RuntimeError(
                f"prompts[{row}]: the prompt with its images has {len(tokens)} tokens in the rollout engine and "
                f"{len(due)} in the data set: set the same mm_processor_kwargs for both, in "
                f"actor_rollout_ref.rollout.{PROCESSOR_KEYS[engine]}, or update the engine and transformers"
            )
