"""The image processor of the stand-in for Kimi-VL: images in their own shape, as patches end to end."""

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class KimiVLImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "image_grid_hws"]

    def __init__(self, patch_size=14, in_token_limit=4096, merge_kernel_size=(2, 2), **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.in_token_limit = in_token_limit
        self.merge_kernel_size = list(merge_kernel_size)

    def preprocess(self, images, return_tensors=None, **kwargs):
        """Return ``pixel_values`` (patches, 3, side, side) and ``image_grid_hws`` (images, 2)."""
        images = [images] if isinstance(images, Image.Image) else list(images)
        patches, grids = zip(*map(self.patches, images), strict=True)
        data = {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)}
        return BatchFeature(data, tensor_type=return_tensors)

    def patches(self, image):
        """Fill the image up to whole tokens with black and cut it into patches, row by row."""
        side = self.patch_size
        down, right = (side * count for count in self.merge_kernel_size)
        pixels = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1
        _, height, width = pixels.shape
        pixels = torch.nn.functional.pad(pixels, (0, -width % right, 0, -height % down), value=-1.0)
        cut = pixels.unfold(1, side, side).unfold(2, side, side)
        return cut.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(), tuple(cut.shape[1:3])
