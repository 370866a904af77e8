"""Helpers of tools, at their established paths."""
