"""What this machine and environment can run, and how to mend what they cannot."""
