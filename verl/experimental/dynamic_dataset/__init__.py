"""Training data that grows while the run goes on."""
