"""Serialization of the columns that a batch is made of."""
