"""Helpers for Megatron-Core."""
