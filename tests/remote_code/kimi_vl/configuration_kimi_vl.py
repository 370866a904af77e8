"""Configurations of a small stand-in for Kimi-VL, with the names that its own repository uses."""

from transformers import PretrainedConfig


class MoonViTConfig(PretrainedConfig):
    model_type = "moonvit"

    def __init__(self, **fields):
        super().__init__(**fields)


class DeepseekV3Config(PretrainedConfig):
    model_type = "deepseek_v3"

    def __init__(self, attention_dropout=0.0, use_cache=True, **fields):
        self.attention_dropout = attention_dropout
        self.use_cache = use_cache
        super().__init__(**fields)


class KimiVLConfig(PretrainedConfig):
    model_type = "kimi_vl"
    sub_configs = {"vision_config": MoonViTConfig, "text_config": DeepseekV3Config}

    def __init__(
        self,
        vision_config=None,
        text_config=None,
        media_placeholder_token_id=90,
        pad_token_id=0,
        **kwargs,
    ):
        given = vision_config or {}
        self.vision_config = MoonViTConfig(**given) if isinstance(given, dict) else given
        given = text_config or {}
        self.text_config = DeepseekV3Config(**given) if isinstance(given, dict) else given
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(pad_token_id=pad_token_id, **kwargs)
