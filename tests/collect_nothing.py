"""Imported first in the server of ranks: its imports run without collections of garbage, until a rank is forked."""

import gc

gc.disable()
