"""Read a run's record: an HTML report, automatic flags, a comparison of two runs, and a live view."""
