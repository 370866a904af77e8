"""A fork as users bring it: DAPO's dynamic sampling in a loop of its own, with own worker, data, reward and losses."""
