"""A small stand-in for MiniCPM-o: names, weights, arguments and mathematics of its vision part, in plain torch.

As in the family, forward takes one mapping ``data`` and hands everything else to the language model of transformers,
and a batch without an image runs the tower in training only.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2PreTrainedModel

from .configuration_minicpm import MiniCPMOConfig


class SiglipVisionEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.patch_size = config.patch_size
        self.side = config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, pixel_values, tgt_sizes):
        """Embed (slices, 3, side, patches * side); a patch has the position of its share of the slice."""
        x = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        at = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        for row, (height, width) in enumerate(tgt_sizes.tolist()):
            down, right = (torch.arange(n, device=x.device) * self.side // n for n in (height, width))
            at[row, : height * width] = (down.unsqueeze(1) * self.side + right).flatten()
        return x + self.position_embedding(at)


class SiglipEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.layer_norm1 = nn.LayerNorm(size, eps=1e-6)
        self.layer_norm2 = nn.LayerNorm(size, eps=1e-6)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(size, size) for name in names})
        sizes = {"fc1": (size, config.intermediate_size), "fc2": (config.intermediate_size, size)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in sizes.items()})

    def forward(self, x, mask):
        normed = self.layer_norm1(x)
        names = ("q_proj", "k_proj", "v_proj")
        parts = [self.self_attn[name](normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for name in names]
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.self_attn["out_proj"](seen.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh"))


class SiglipEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers)])


class SiglipVisionTransformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_dim = config.hidden_size
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=1e-6)

    def forward(self, pixel_values, patch_attention_mask, tgt_sizes):
        x = self.embeddings(pixel_values, tgt_sizes)
        mask = patch_attention_mask[:, None, None]
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return self.post_layernorm(x)


class Resampler(nn.Module):
    """A fixed number of queries that attend to the patches of a slice."""

    def __init__(self, num_queries, embed_dim, kv_dim, num_heads=2):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, embed_dim))
        self.kv_proj = nn.Linear(kv_dim, embed_dim, bias=False)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.ln_q = nn.LayerNorm(embed_dim, eps=1e-6)
        self.ln_kv = nn.LayerNorm(embed_dim, eps=1e-6)
        self.ln_post = nn.LayerNorm(embed_dim, eps=1e-6)
        self.proj = nn.Parameter(torch.zeros(embed_dim, embed_dim))

    def forward(self, x, tgt_sizes):
        counts = tgt_sizes.prod(-1).unsqueeze(1).to(x.device)
        is_padding = torch.arange(x.shape[1], device=x.device) >= counts
        values = self.ln_kv(self.kv_proj(x))
        queries = self.ln_q(self.query).expand(len(x), -1, -1)
        seen, _ = self.attn(queries, values, values, key_padding_mask=is_padding, need_weights=False)
        return self.ln_post(seen) @ self.proj


class MiniCPMOPreTrainedModel(Qwen2PreTrainedModel):
    config_class = MiniCPMOConfig
    _no_split_modules = ["Qwen2DecoderLayer", "SiglipEncoderLayer"]


class MiniCPMO(MiniCPMOPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.llm = Qwen2ForCausalLM(config)
        self.vpm = SiglipVisionTransformer(config.vision_config)
        self.resampler = Resampler(config.query_num, config.hidden_size, self.vpm.embed_dim)
        self.post_init()

    def get_input_embeddings(self):
        return self.llm.get_input_embeddings()

    def get_output_embeddings(self):
        return self.llm.lm_head

    def get_vllm_embedding(self, data):
        """Return the embeddings of the tokens with those of the images in their places, and the latter of each row."""
        embeddings = self.llm.model.embed_tokens(data["input_ids"])
        dtype, device = embeddings.dtype, embeddings.device
        slices = [part for row in data["pixel_values"] for part in row]
        if slices:
            tgt_sizes = torch.vstack([sizes for sizes in data["tgt_sizes"] if isinstance(sizes, torch.Tensor)])
            flat = [part.to(device, dtype).flatten(end_dim=1).permute(1, 0) for part in slices]
            padded = nn.utils.rnn.pad_sequence(flat, batch_first=True)  # (slices, patches * side, 3 * side)
            pixels = padded.permute(0, 2, 1).reshape(len(slices), 3, -1, padded.shape[1])
            longest = int(tgt_sizes.prod(-1).max())
            mask = torch.arange(longest, device=device) < tgt_sizes.prod(-1).unsqueeze(1).to(device)
            size = self.config.vision_batch_size
            batches = zip(pixels.split(size), mask.split(size), tgt_sizes.split(size), strict=True)
            features = self.resampler(torch.cat([self.vpm(*batch) for batch in batches]), tgt_sizes)
            seen = features.split([len(row) for row in data["pixel_values"]])
        else:
            seen = [[]] * len(data["pixel_values"])
            if self.training:
                side = self.vpm.embeddings.patch_size
                one = torch.ones(1, 2, dtype=torch.long)
                mask = torch.ones(1, 1, dtype=torch.bool, device=device)
                blank = torch.zeros(1, 3, side, side, device=device, dtype=dtype)
                seen = [self.resampler(self.vpm(blank, mask, one), one)] * len(data["pixel_values"])
        merged = embeddings.clone()
        for row, features in enumerate(seen):
            bounds = data["image_bound"][row]
            if len(features) and len(bounds):
                at = torch.cat([torch.arange(first, last) for first, last in bounds.tolist()]).to(device)
                merged[row] = embeddings[row].index_copy(0, at, features.flatten(0, 1).to(dtype))
            elif len(features) and self.training:
                merged[row] = merged[row] + features[0].mean() * 0
        return merged, list(seen)

    def forward(self, data, **kwargs):
        embeddings, _ = self.get_vllm_embedding(data)
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            kwargs.pop(name, None)
        positions = data["position_ids"].long()
        return self.llm(input_ids=None, position_ids=positions, inputs_embeds=embeddings, **kwargs)
