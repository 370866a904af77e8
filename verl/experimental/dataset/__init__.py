"""Samplers that a run can bring along."""
