"""A fused head equals the model's own logits with scale and soft cap, and rejects models it cannot fuse."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from verl.models.transformers.dense_common import HeadRequest, has_fused_head, install_fused_head
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.kernel.linear_cross_entropy import backend_of

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Config": {},
    "Gemma2Config": {"head_dim": 8, "final_logit_softcapping": 3.0},  # a soft cap that bites
    "CohereConfig": {"logit_scale": 0.25},
    "GraniteConfig": {"logits_scaling": 3.0},
    "PhiConfig": {},  # a head with a bias
}


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, name)(**(SIZES | FAMILIES.get(name, {}) | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.eval()


def ids() -> Tensor:
    return torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))


def scores(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(model(input_ids=ids(), use_cache=False).logits / temperature, dim=-1)
    return log_p.gather(-1, ids().roll(-1, dims=-1).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gradients(model: Any, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(2, *log_probs.shape, generator=torch.Generator().manual_seed(2))
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_logits_of_the_model(family: str) -> None:
    model = model_of(family)
    plain = scores(model, 0.7)
    expected = gradients(model, *plain)
    logits = model(input_ids=ids()).logits
    apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=True)
    output = model(input_ids=ids(), use_cache=False, temperature=0.7, return_dict=True)
    torch.testing.assert_close((output.log_probs, output.entropy), plain, atol=1e-5, rtol=1e-5)
    found = gradients(model, output.log_probs, output.entropy)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    assert torch.equal(model(input_ids=ids()).logits, logits)  # as before where no score is asked


def test_scores_what_is_asked() -> None:
    model = model_of("Qwen2Config")
    log_probs, entropy = scores(model, 1.3)
    install_fused_head(model)
    assert has_fused_head(model) and not has_fused_head(model_of("Qwen2Config"))
    at = torch.tensor([3, 9, 0])
    for mode in ("none", "value", "grad"):
        request = HeadRequest(at, ids().roll(-1, dims=-1).flatten()[at], 1.3, mode)
        output = model(input_ids=ids(), use_cache=False, head_request=request)
        torch.testing.assert_close(output.log_probs, log_probs.flatten()[at], atol=1e-5, rtol=1e-5)
        assert (output.entropy is None) == (mode == "none")
        if output.entropy is not None:
            torch.testing.assert_close(output.entropy, entropy.flatten()[at], atol=1e-5, rtol=1e-5)
            assert output.entropy.requires_grad == (mode == "grad")


def test_what_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = model_of("Qwen2Config")
    get_peft_model(adapted, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    for model, message in (
        (adapted, "remove the head from model.target_modules, or set use_fused_kernels=False"),
        # divides the hidden states before the head
        (model_of("MiniCPM3Config", num_key_value_heads=4), "MiniCPM3ForCausalLM computes its logits by more than"),
    ):
        with pytest.raises(ValueError, match=message):
            install_fused_head(model)
        assert not has_fused_head(model)
    with pytest.raises(ValueError, match="impl_backend=triton needs a CUDA device, this one is cpu: write torch"):
        backend_of("triton", torch.device("cpu"))
