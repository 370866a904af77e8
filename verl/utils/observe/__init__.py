"""Record and show a run: metrics, digests, traces, curves."""
