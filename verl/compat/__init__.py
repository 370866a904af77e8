"""What is here only for forks and names of other versions: ``facades`` says which module needs it.

A module goes when no supported version of the established project has its path.
"""

from verl.compat.facades import facade as facade
