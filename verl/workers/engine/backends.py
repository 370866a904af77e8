"""The packages of engines that are imported when they are asked for, because that takes seconds.

Each registers its classes with ``EngineRegistry``. Those of FSDP are registered with ``verl.workers.engine`` itself.
"""

LATE_BACKENDS = {"megatron": "verl.workers.engine.megatron"}
