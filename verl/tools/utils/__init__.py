"""Helpers of tools, at their paths in the established verl interface."""
