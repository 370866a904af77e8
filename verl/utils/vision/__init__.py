"""Images and videos: position ids, FLOPs, transport in batches, value models."""
