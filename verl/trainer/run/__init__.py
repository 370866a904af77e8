"""What every run has, whatever the algorithm: checks, launch, display, output, clock."""
