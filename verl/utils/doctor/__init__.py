"""Check which features this machine and environment can run, and say how to fix the others."""
