"""Users and environments that answer a model during a rollout."""
