"""Import path of ``left_right_2_no_padding`` in the established verl interface."""

from verl.workers.roles.padding import left_right_2_no_padding, no_padding_2_padding

__all__ = ["left_right_2_no_padding", "no_padding_2_padding"]
