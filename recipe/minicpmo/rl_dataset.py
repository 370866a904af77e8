"""Prompts for MiniCPM-o, whose processor takes and returns other forms than those of verl's own vision families."""

import torch

from verl.utils.dataset.files import Row
from verl.utils.dataset.rl_dataset import RLHFDataset as Prompts
from verl.utils.dataset.vision_utils import Media, MediaError, load_image

MARKER = "<image>"
PLACEHOLDER = "(<image>./</image>)"
"""What the processor and the rollout engine replace by the slices of an image."""
MODEL_INPUTS = ("pixel_values", "tgt_sizes", "image_bound")


class RLHFDataset(Prompts):
    """Chat prompts with images for MiniCPM-o.

    An image keeps its size, since the processor slices it. ``multi_modal_inputs`` holds ``pixel_values``, a list of
    slices, their ``tgt_sizes`` (n, 2) in patches, and ``image_bound`` (n, 2), the first token of each slice and the
    one behind its last in the padded prompt.

    Raises: as the base class; DataError also for a row whose markers and images do not match.
    """

    def _build_messages(self, example: Row) -> list[Row]:
        """Take the messages out of a row; the chat template takes texts only."""
        messages = example.pop(self.prompt_key)
        if self.media is None or self.image_key is None:
            return list(messages)
        return [
            {key: value.replace(MARKER, PLACEHOLDER) if key == "content" else value for key, value in message.items()}
            for message in messages
        ]

    def take_media(self, row: Row) -> Media:
        """Take the images out of a row.

        Raises: MediaError when one cannot be read, or for a video.
        """
        if self.media is None:
            return super().take_media(row)
        if row.pop(self.video_key, None):
            raise MediaError(f"column {self.video_key!r}: the recipe minicpmo reads images only: drop the column")
        media = Media()
        for index, entry in enumerate(row.pop(self.image_key, None) or []):
            try:
                media.images.append(load_image(entry, self.media.limits))
            except MediaError as error:
                raise MediaError(f"column {self.image_key!r}: entry {index}: {error}") from error
        return media

    def _tensors(self, item: int, text: str, media: Media) -> Row:
        """Return the padded prompt; the processor returns batches, of which this row is the only one."""
        found = text.count(PLACEHOLDER)
        if found != len(media.images):
            raise MediaError(
                f"column {self.image_key!r}: has {len(media.images)} images for {found} markers {MARKER} in column "
                f"{self.prompt_key!r}: write one marker for each image"
            )
        tensors = super()._tensors(item, text, media)
        encoded = tensors.get("multi_modal_inputs")
        if encoded:
            inputs = {name: encoded[name][0] for name in MODEL_INPUTS}
            pad = int((tensors["attention_mask"] == 0).sum())
            inputs["image_bound"] = torch.as_tensor(inputs["image_bound"], dtype=torch.long) + pad
            tensors["multi_modal_inputs"] = inputs
        return tensors
