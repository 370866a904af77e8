"""Code for forks and names of other versions only. Nothing of ours calls it, and only façades import it.

The table of ``facades`` says who needs each path and when it can go; a module here goes with the last path that names
it. The helpers of agent loops, scoring in processes and execution pools are names of modules that have more in them.
"""

from verl.compat.facades import facade as facade
