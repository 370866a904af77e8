"""The processor of the stand-in for MiniCPM-o."""

import re

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin

PLACEHOLDER = r"\(<image>\./</image>\)"


class MiniCPMOProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, text, images=None, **kwargs):
        """Encode one row: the slices of its images, and the first token of each and the one behind its last."""
        (prompt,) = [text] if isinstance(text, str) else text
        encoded = self.image_processor(images)
        parts = re.split(PLACEHOLDER, prompt)
        sizes = encoded["image_sizes"][0]
        if len(sizes) != len(parts) - 1:
            raise ValueError(f"{len(sizes)} images for {len(parts) - 1} placeholders")
        shown = [self.image_processor.get_slice_image_placeholder(size, at) for at, size in enumerate(sizes)]
        whole = parts[0] + "".join(picture + part for picture, part in zip(shown, parts[1:], strict=True))
        ids = torch.tensor(self.tokenizer(whole, add_special_tokens=False)["input_ids"])
        opens, closes = (
            torch.tensor(self.tokenizer.convert_tokens_to_ids(marks))
            for marks in (["<image>", "<slice>"], ["</image>", "</slice>"])
        )
        first, last = (torch.isin(ids, marks).nonzero()[:, 0] for marks in (opens, closes))
        return BatchFeature(
            {
                "input_ids": ids.unsqueeze(0),
                "attention_mask": torch.ones_like(ids).unsqueeze(0),
                "pixel_values": encoded["pixel_values"],
                "image_sizes": encoded["image_sizes"],
                "image_bound": [torch.stack([first + 1, last], dim=1)],
                "tgt_sizes": encoded["tgt_sizes"],
            }
        )
