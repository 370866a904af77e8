"""The parts of a run that do not depend on the algorithm.

``inputs`` checks files, models and the machine; ``launch`` starts and stops Ray and reports failures; ``clock`` times
the start; ``resume`` finds the checkpoint to continue from; ``output`` writes record, trackers, curves and report;
``display`` shows the progress.
"""
