"""The processor of the stand-in for Kimi-VL."""

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, **kwargs):
        """Replace each image token by one for each merged patch, and encode text and images."""
        texts = [text] if isinstance(text, str) else list(text)
        inputs = {} if images is None else dict(self.image_processor(images, return_tensors="pt"))
        down, right = self.image_processor.merge_kernel_size
        sizes = [int(grid.prod()) // (down * right) for grid in inputs.get("image_grid_hws", [])]
        pieces = [piece.split(self.image_token) for piece in texts]
        if images is not None:
            if len(sizes) != sum(len(parts) - 1 for parts in pieces):
                raise ValueError(f"{len(sizes)} images for {sum(len(parts) - 1 for parts in pieces)} image tokens")
            left = iter(sizes)
            texts = [parts[0] + "".join(self.image_token * next(left) + part for part in parts[1:]) for parts in pieces]
        options = {name: value for name, value in kwargs.items() if name in ("add_special_tokens", "return_tensors")}
        return BatchFeature({**self.tokenizer(texts, **options), **inputs})
