"""Code for forks and names of other versions only: ``facades`` names the module that needs each part.

A module goes when no supported version of the established project has its path.
"""

from verl.compat.facades import facade as facade
