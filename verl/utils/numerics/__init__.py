"""Numerical building blocks: log-probabilities, KL, schedules, seeds."""
