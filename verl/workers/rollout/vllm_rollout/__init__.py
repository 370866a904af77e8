"""The vLLM rollout."""

from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout as vLLMRollout
