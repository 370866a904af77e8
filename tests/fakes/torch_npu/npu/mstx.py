"""Ranges, as a list of events that the fake profiler reads."""

import itertools

events = []
_ids = itertools.count(1)
_open = {}


def range_start(message, stream=None, domain="default"):
    number = next(_ids)
    _open[number] = message
    events.append(("start", message))
    return number


def range_end(range_id, domain="default"):
    events.append(("end", _open.pop(range_id)))


def mark(message, stream=None, domain="default"):
    events.append(("mark", message))
