"""Tensor mathematics of the algorithms: no Ray, no engine, no input or output.

- ``config``: the node ``algorithm``.
- ``advantage``: advantage estimators, and the policy filtration of PF-PPO.
- ``policy_loss``, ``value_loss``, ``kl``: the losses.
- ``token_loss``, ``selection``: inputs and result of a policy loss, and the tokens that it selects.
- ``aggregate``: sums over a micro-batch, and the units that divide them.
- ``mismatch``: metrics of the mismatch of rollout and trainer, and the importance weights that correct for it.
"""
