"""Images and videos: position ids, and transport in batches."""
