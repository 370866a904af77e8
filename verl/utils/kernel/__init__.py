"""Kernels that spare a large intermediate result."""
