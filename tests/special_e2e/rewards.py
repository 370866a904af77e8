"""A reward that every model earns some of, so that few steps of a random one have a gradient."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of lower-case letters among the first characters."""
    text = solution_str[:16]
    return sum(character.islower() for character in text) / 16


def two_letters(data_source, solution_str, ground_truth, extra_info=None):
    """Return whether two of the first characters are lower-case letters; they never are for every third prompt."""
    index = extra_info["index"]
    right = compute_score(data_source, solution_str, ground_truth) >= 2 / 16 and index % 3 != 0
    return {"score": float(right), "acc": right, "index": index}


def last_letter(data_source, solution_str, ground_truth, extra_info=None):
    """Return whether the last character is a lower-case letter, which the last segment of a trajectory tells too."""
    return float(solution_str[-1:].islower())


def never(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of a task that nobody can do."""
    return 0.0
