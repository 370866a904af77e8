"""Check what this machine and environment can run, and how to fix the rest."""
