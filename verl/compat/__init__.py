"""Code that only users' forks and names of other versions need. No other code of verl calls it; only façades import it.

The table of ``facades`` says who needs each path and when it can go; a module here goes with the last path that names
it. Modules of the library that have more in them than names for forks list these as ``_FOR_FORKS`` and load them from
here: helpers of ``verl.utils``, agent loops, scoring in processes and execution pools. They go when no fork builds on
version 0.6 or an earlier one.
"""

from verl.compat.facades import facade as facade
