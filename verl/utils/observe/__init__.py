"""Record and show what a run does: metrics, digests, traces, curves."""
