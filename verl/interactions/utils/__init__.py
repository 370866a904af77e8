"""Helpers of interactions, at their established paths."""
