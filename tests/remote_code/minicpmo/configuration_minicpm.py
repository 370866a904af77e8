"""The configuration of a small stand-in for MiniCPM-o, with the names that its own repository uses."""

from transformers import PretrainedConfig, Qwen2Config


class MiniCPMVisionConfig(PretrainedConfig):
    model_type = "siglip_vision_model"

    def __init__(
        self,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=112,
        patch_size=14,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.image_size = image_size
        self.patch_size = patch_size
        super().__init__(**kwargs)


class MiniCPMOConfig(Qwen2Config):
    model_type = "minicpmo"

    def __init__(self, vision_config=None, query_num=4, patch_size=14, vision_batch_size=2, **kwargs):
        given = vision_config or {}
        self.vision_config = MiniCPMVisionConfig(**given) if isinstance(given, dict) else given
        self.query_num = query_num
        self.patch_size = patch_size
        self.vision_batch_size = vision_batch_size
        self.init_vision, self.init_audio, self.init_tts = True, False, False
        self.version = "2.6"
        super().__init__(**kwargs)
