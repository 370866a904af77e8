"""Supervised training: one process per device, started by ``torchrun``."""
