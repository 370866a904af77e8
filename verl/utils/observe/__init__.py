"""What a run records of itself: metrics, digests, traces, curves."""
