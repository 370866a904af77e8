"""The model on Megatron-Core, which is prepared for the CPU before a module of this package imports it."""

from verl.utils.megatron import cpu_support

cpu_support.install()
