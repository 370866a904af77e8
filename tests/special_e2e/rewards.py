"""A reward that every model earns some of, so that few steps of a random one have a gradient."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of lower-case letters among the first characters."""
    text = solution_str[:16]
    return sum(character.islower() for character in text) / 16
