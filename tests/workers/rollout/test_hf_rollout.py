"""Generation by transformers: the model that is built, and models that return more than logits."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.workers.rollout import tiny
from verl.models.transformers.names import PACKED
from verl.workers.config import HFModelConfig
from verl.workers.rollout.hf_rollout import HFRollout


@pytest.mark.parametrize("asks", [False, True])
def test_models_that_return_the_logits_of_their_routers(tmp_path: Path, asks: bool) -> None:
    """Transformers would make their balancing loss of the prompt's mask and the logits of one token, and fail."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    size = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    config = Qwen3MoeConfig(
        **shape, **size, num_experts_per_tok=2, vocab_size=tiny.VOCABULARY, output_router_logits=asks
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).requires_grad_(False).eval()
    tiny.disturb(model, 0.1, seed=1)
    rollout = tiny.start_rollout("hf", model, tmp_path, load_format="dummy")
    tiny.load_all(rollout, model)
    batch = rollout.generate_sequences(tiny.prompts_batch(3))
    assert batch.batch["rollout_log_probs"].shape == batch.batch["responses"].shape
    expected = tiny.reference_log_probs(model, batch, tiny.TEMPERATURE)
    assert torch.allclose(batch.batch["rollout_log_probs"], expected, atol=1e-5)  # fp32 in another order of sums


@pytest.mark.parametrize("asked, used", [(None, "sdpa"), (PACKED, "sdpa"), ("eager", "eager")])
@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_the_attention_is_that_of_the_override(tmp_path: Path, asked: str | None, used: str, load_format: str) -> None:
    """The attention of packed rows has no cache, so generation takes another."""
    tiny.build_model().save_pretrained(tmp_path)
    overrides = {} if asked is None else {"attn_implementation": asked}
    model_config = HFModelConfig(path=str(tmp_path), load_tokenizer=False, override_config=overrides)
    rollout = HFRollout(tiny.rollout_config("hf", load_format=load_format), model_config)
    assert rollout.module.config._attn_implementation == used
