"""The image processor of the stand-in for MiniCPM-o: an image as slices of 28 x 28 pixels at most."""

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

SLICE = 28


class MiniCPMVImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]

    def __init__(self, patch_size=14, image_feature_size=4, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.image_feature_size = image_feature_size

    def preprocess(self, images, return_tensors=None, **kwargs):
        """Return lists with an entry for each row: slices, sizes of the images, sizes of the slices in patches."""
        rows = images if images and isinstance(images[0], list) else [images]
        slices = [[part for image in row for part in self.slices(image)] for row in rows]
        sizes = [torch.tensor([part.shape[1:] for part in row]) // self.patch_size for row in slices]
        data = {
            "pixel_values": [[self.by_patch(part) for part in row] for row in slices],
            "image_sizes": [[image.size for image in row] for row in rows],
            "tgt_sizes": sizes,
        }
        return BatchFeature(data)

    def slices(self, image: Image.Image):
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1
        return [part for band in pixels.split(SLICE, 1) for part in band.split(SLICE, 2)]

    def by_patch(self, pixels):
        """Lay the patches of a slice side by side: (3, side, patches * side)."""
        side = self.patch_size
        cut = pixels.unfold(1, side, side).unfold(2, side, side)  # (3, rows, columns, side, side)
        return cut.flatten(1, 2).transpose(1, 2).reshape(3, side, -1)

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True):
        width, height = (-(-side // SLICE) for side in image_size)
        queries = "<unk>" * self.image_feature_size
        return f"<image>{queries}</image>" + f"<slice>{queries}</slice>" * (width * height - 1)
