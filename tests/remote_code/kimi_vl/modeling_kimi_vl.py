"""A small stand-in for Kimi-VL: names, weights, arguments and mathematics of the family, in plain torch.

As in code written for a model alone, attention reads neither position ids nor anything else to tell packed sequences
apart, forward takes no further keyword arguments, and the bias of the router's ``noaux_tc`` works in eval mode only.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_kimi_vl import DeepseekV3Config, KimiVLConfig, MoonViTConfig

# The tower


class Learnable2DInterpPosEmb(nn.Module):
    def __init__(self, height, width, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(height, width, dim))

    def forward(self, x, grid_hws):
        table = self.weight.permute(2, 0, 1).unsqueeze(0)
        parts = []
        for height, width in grid_hws.tolist():
            fitted = table
            if (height, width) != tuple(self.weight.shape[:2]):
                fitted = F.interpolate(table, size=(height, width), mode="bicubic")
            parts.append(fitted[0].permute(1, 2, 0).flatten(end_dim=1))
        return x + torch.cat(parts)


class MoonVisionPatchEmbed(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=size, stride=size)
        self.pos_emb = Learnable2DInterpPosEmb(
            config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size
        )

    def forward(self, x, grid_hws):
        return self.pos_emb(self.proj(x).flatten(1), grid_hws)


def rotations(grid_hws, dim):
    """Return cos + i sin of the column and the row of each patch, in turns: (patches, dim / 2)."""
    speeds = 10000.0 ** (-torch.arange(0, dim, 4).float() / dim)
    parts = []
    for height, width in grid_hws.tolist():
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        angles = [torch.outer(at.flatten().float(), speeds) for at in (columns, rows)]
        parts.append(torch.stack(angles, dim=-1).flatten(1))
    angles = torch.cat(parts).to(grid_hws.device)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(-2).type_as(x)


class MLP2(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.fc0 = nn.Linear(size, inner)
        self.fc1 = nn.Linear(inner, size)

    def forward(self, x):
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class MoonVitEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(size)
        self.norm1 = nn.LayerNorm(size)
        self.mlp = MLP2(size, config.intermediate_size)
        self.wqkv = nn.Linear(size, 3 * size)
        self.wo = nn.Linear(size, size)

    def forward(self, x, lengths, turns):
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.num_heads, -1).unbind(1)
        q, k = rotate(q, turns), rotate(k, turns)
        images = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
        seen = [F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in image)) for image in images]
        x = x + self.wo(torch.cat([part.transpose(0, 1) for part in seen]).flatten(1))
        return x + self.mlp(self.norm1(x))


class MoonVitEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.blocks = nn.ModuleList([MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, x, grid_hws):
        turns = rotations(grid_hws, self.head_dim)
        for block in self.blocks:
            x = block(x, grid_hws.prod(-1).tolist(), turns)
        return self.final_layernorm(x)


class MoonVitPretrainedModel(PreTrainedModel):
    config_class = MoonViTConfig
    _no_split_modules = ["MoonVitEncoderLayer"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.patch_embed = MoonVisionPatchEmbed(config)
        self.encoder = MoonVitEncoder(config)
        self.post_init()

    def forward(self, pixel_values, grid_hws):
        """Return the merged patches of each image, (tokens, patches of a token, hidden)."""
        x = self.encoder(self.patch_embed(pixel_values, grid_hws), grid_hws)
        down, right = self.config.merge_kernel_size
        merged = []
        for (height, width), part in zip(grid_hws.tolist(), x.split(grid_hws.prod(-1).tolist()), strict=True):
            blocks = part.view(height // down, down, width // right, right, -1).transpose(1, 2)
            merged.append(blocks.reshape(-1, down * right, part.shape[-1]))
        return merged


class KimiVLMultiModalProjector(nn.Module):
    def __init__(self, config):
        super().__init__()
        vision = config.vision_config
        self.hidden_size = vision.hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.linear_2 = nn.Linear(self.hidden_size, config.text_config.hidden_size)

    def forward(self, image_features):
        x = self.pre_norm(torch.cat(image_features)).view(-1, self.hidden_size)
        return self.linear_2(F.gelu(self.linear_1(x)))


# The language model


class DeepseekV3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.float() * scale).to(x.dtype)


class DeepseekV3RotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, seq_len):
        """Return cos and sin of the positions below ``seq_len``, each (seq_len, dim)."""
        speeds = self.base ** (-torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
        angles = torch.outer(torch.arange(seq_len, device=x.device).float(), speeds)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos, sin = (table[position_ids].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))  # pairs lie next to each other
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class DeepseekV3Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
        self.num_heads = config.num_attention_heads
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.q_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        size = config.hidden_size
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(size, self.num_heads * self.q_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, self.q_lora_rank, bias=config.attention_bias)
            self.q_a_layernorm = DeepseekV3RMSNorm(self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, self.num_heads * self.q_head_dim, bias=False)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(size, latent, bias=config.attention_bias)
        self.kv_a_layernorm = DeepseekV3RMSNorm(self.kv_lora_rank)
        width = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, width, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, size, bias=config.attention_bias)
        self.rotary_emb = DeepseekV3RotaryEmbedding(self.qk_rope_head_dim, config.rope_theta)
        self.softmax_scale = self.q_head_dim**-0.5

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        **kwargs,
    ):
        batch, length, _ = hidden_states.shape
        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, length, self.num_heads, self.q_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_pe = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k_nope, value = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        cos, sin = self.rotary_emb(value, seq_len=length)
        q_pe, k_pe = apply_rotary_pos_emb(q_pe, k_pe.unsqueeze(1), cos, sin, position_ids)
        query = torch.cat([q_nope, q_pe], dim=-1)
        key = torch.cat([k_nope, k_pe.expand_as(q_pe)], dim=-1)
        scores = query @ key.transpose(2, 3) * self.softmax_scale + attention_mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        weights = F.dropout(weights, p=self.attention_dropout, training=self.training)
        out = (weights @ value).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out), weights if output_attentions else None, past_key_value


ATTENTION_CLASSES = {"eager": DeepseekV3Attention}


class DeepseekV3MLP(nn.Module):
    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts))

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        if self.config.topk_method == "noaux_tc":
            assert not self.training
            chosen = (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        elif self.config.topk_method == "greedy":
            chosen = scores.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.routed_scaling_factor


class DeepseekV3MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList([DeepseekV3MLP(config, size) for _ in range(config.n_routed_experts)])
        self.gate = MoEGate(config)
        self.shared_experts = DeepseekV3MLP(config, size * config.n_shared_experts)

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, 1)
        chosen, weights = self.gate(x)
        routed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            routed = routed.index_add(0, token, expert(x[token]) * weights[token, slot].unsqueeze(1).to(x.dtype))
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class DeepseekV3DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = ATTENTION_CLASSES[config._attn_implementation](config, layer_idx)
        is_dense = layer_idx < config.first_k_dense_replace
        self.mlp = DeepseekV3MLP(config, config.intermediate_size) if is_dense else DeepseekV3MoE(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
    ):
        seen, weights, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            output_attentions=output_attentions,
            use_cache=use_cache,
        )
        hidden_states = hidden_states + seen
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states, weights) if output_attentions else (hidden_states,)


class DeepseekV3PreTrainedModel(PreTrainedModel):
    config_class = DeepseekV3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekV3DecoderLayer"]


class DeepseekV3Model(DeepseekV3PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = [DeepseekV3DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self._use_flash_attention_2 = config._attn_implementation == "flash_attention_2"
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = x.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device).unsqueeze(0)
        if self._use_flash_attention_2:
            mask = attention_mask if attention_mask is not None and 0 in attention_mask else None
        else:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(len(x), 1, -1, -1)
            if attention_mask is not None:
                seen = seen & attention_mask.bool()[:, None, None]
            mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
            mask = mask.masked_fill(~seen, torch.finfo(x.dtype).min)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                run = layer.__call__
                outputs = self._gradient_checkpointing_func(run, x, mask, position_ids, None, False, False)
            else:
                outputs = layer(x, mask, position_ids)
            x = outputs[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class DeepseekV3ForCausalLM(DeepseekV3PreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = DeepseekV3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        return CausalLMOutputWithPast(logits=self.lm_head(outputs[0]).float())


# Both


class KimiVLPreTrainedModel(PreTrainedModel):
    config_class = KimiVLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonVitEncoderLayer", "DeepseekV3DecoderLayer"]


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def _merge_with_image_features(self, inputs_embeds, input_ids, image_features):
        flat = inputs_embeds.flatten(0, 1).clone()
        flat[input_ids.flatten() == self.config.media_placeholder_token_id] = image_features
        return flat.view_as(inputs_embeds)

    def _extract_image_features(self, pixel_values, image_grid_hws):
        return self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))

    def forward(
        self,
        input_ids=None,
        pixel_values=None,
        image_grid_hws=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if pixel_values is not None and len(pixel_values) > 0 and input_ids.shape[1] != 1:
                image_features = self._extract_image_features(pixel_values, image_grid_hws)
                inputs_embeds = inputs_embeds.to(image_features.dtype)
                inputs_embeds = self._merge_with_image_features(inputs_embeds, input_ids, image_features)
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
