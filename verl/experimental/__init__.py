"""Samplers that learn and data sets that grow: their interface may still change."""
