"""``GPTModel`` of Megatron-Core: its layers, its heads and its construction. The modules here import Megatron-Core."""
