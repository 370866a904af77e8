"""Established paths of names of other packages."""
