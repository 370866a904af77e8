"""Helpers of interactions, at their paths in the established verl interface."""
