"""Helpers around Megatron-Core; nothing here imports it before it is used."""
