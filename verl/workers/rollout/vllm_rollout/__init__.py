"""The vLLM rollouts."""

from verl.workers.rollout.vllm_rollout.async_rollout import vLLMAsyncRollout as vLLMAsyncRollout
from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout as vLLMRollout
