"""Rewards: the managers that score a batch of responses, and the scorers that they call.

- ``signature``: the arguments by which each manager calls a scorer; free of torch, for the checks before the launch.
- ``loading``: the manager and the scorer that a config names.
- ``managers``: the base class, the registry, and the managers ``naive``, ``dapo``, ``batch`` and ``prime``.
- ``scoring``: samples, scores and failures, which all managers share.
- ``judge``: a generative reward model.
- ``chat_rendering``: the chats of a reward model whose chat template differs from the policy's.

``verl.workers.reward_manager`` is the path of the managers in the established verl interface.
"""
