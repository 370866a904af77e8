"""Tools that a model can call during a rollout."""
