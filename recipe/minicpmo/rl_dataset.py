"""Prompts for MiniCPM-o, whose processor has another interface than those of the families that verl supports."""

import torch

from verl.utils.dataset.files import Row
from verl.utils.dataset.rl_dataset import RLHFDataset as Prompts
from verl.utils.dataset.vision_utils import Media, MediaError, load_image

MARKER = "<image>"
PLACEHOLDER = "(<image>./</image>)"
"""The text that the processor and the rollout engine replace by the slices of an image."""
MODEL_INPUTS = ("pixel_values", "tgt_sizes", "image_bound")


class RLHFDataset(Prompts):
    """Chat prompts with images for MiniCPM-o.

    Images are not resized, since the processor cuts them into slices. ``multi_modal_inputs`` holds ``pixel_values``, a
    list of slices; ``tgt_sizes`` (n, 2), their sizes in patches; and ``image_bound`` (n, 2), the start and the end
    (exclusive) of each slice's tokens in the padded prompt.

    Raises: as the base class, and DataError for a row whose numbers of markers and images differ.
    """

    def _build_messages(self, example: Row) -> list[Row]:
        """Remove the messages from a row and return them, each with a text as content: the chat template needs that."""
        messages = example.pop(self.prompt_key)
        if self.media is None or self.image_key is None:
            return list(messages)
        return [
            {key: value.replace(MARKER, PLACEHOLDER) if key == "content" else value for key, value in message.items()}
            for message in messages
        ]

    def take_media(self, row: Row) -> Media:
        """Remove the images from a row and return them.

        Raises: MediaError for an image that cannot be read, or for a video.
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
        """Return the padded prompt, with the image tensors of this row taken from the processor's batch of one."""
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
