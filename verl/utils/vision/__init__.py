"""Images and videos: positions, FLOPs, batches, value models."""
