"""Kernels that avoid a large intermediate result."""
