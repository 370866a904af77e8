"""The parts of a run that do not depend on the algorithm.

``inputs`` checks files and machine before the start; ``launch`` starts and stops Ray and reports failures; ``offline``
runs commands without a training loop; ``clock`` times the start; ``output`` writes record, trackers, curves and report,
with ``reports`` of the ranks, ``prometheus`` and ``display``; ``terminal`` carries the display of an actor to the
launching process.
"""
