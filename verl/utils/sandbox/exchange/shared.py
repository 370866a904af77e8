"""The containers that both processes hold: a change in one of the copies reaches the other.

Only one process runs at a time, the other waits for it. So it is enough that each message says what its sender has
changed since the last one. A container is compared with its contents at that time, item by item and by identity.

A container leaves the table as soon as one of the processes holds it no longer, which the count of its references
tells. A test that calls a function with a thousand lists therefore does not compare a thousand lists with each call.
"""

import operator
import sys

from .values import Container, Value, contents, replace_contents


class _Entry:
    __slots__ = ("items", "value")

    def __init__(self, value: Container) -> None:
        self.value = value
        self.items = contents(value)
        """The contents that both processes know."""

    def references(self) -> int:
        return sys.getrefcount(self.value)


_FROM_HERE = _Entry([]).references()
"""References to a container that only an entry holds."""


class Shared:
    """Containers by key. A key of 0 or more was given by this process, ``~key`` is the same for the other one."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._keys: dict[int, int] = {}
        self._next = 0
        self._released: list[int] = []

    def size(self) -> int:
        """Return the number of shared containers."""
        return len(self._entries)

    def key(self, value: Container) -> int | None:
        """Return the key of a container; None if the other process does not have it."""
        return self._keys.get(id(value))

    def value(self, key: int) -> Container:
        """Return the container of a key.

        Raises: KeyError.
        """
        return self._entries[key].value

    def add(self, key: int, value: Container) -> None:
        """Share a container with its present contents.

        Raises: ValueError if the key is taken.
        """
        if key in self._entries:
            raise ValueError(f"two containers have the key {key}")
        self._entries[key] = _Entry(value)
        self._keys[id(value)] = key

    def new_key(self) -> int:
        """Return a key that this process has not given before."""
        self._next += 1
        return self._next - 1

    def changed(self) -> list[int]:
        """Return the keys of the containers that this process has changed since the last message."""
        return [key for key, entry in self._entries.items() if not _same(contents(entry.value), entry.items)]

    def agree(self, key: int) -> None:
        """Note that both processes know the present contents."""
        self._entries[key].items = contents(self._entries[key].value)

    def replace(self, key: int, items: list[Value]) -> None:
        """Take over the contents that the other process sent.

        Raises: KeyError.
        """
        replace_contents(self._entries[key].value, items)
        self.agree(key)

    def forget(self, key: int) -> list[Value]:
        """Remove a container that one of the processes no longer holds, and return its last common contents.

        Raises: KeyError.
        """
        entry = self._entries.pop(key)
        del self._keys[id(entry.value)]
        return entry.items

    def release(self, changed: list[int]) -> list[int]:
        """Remove the containers that only this table holds, and return the keys that the other process does not know.

        The contents of removed containers are released too, so that one call is enough for nested lists. Containers in
        ``changed`` stay until the other process knows their contents.
        """
        kept = set(changed)
        waiting = list(self._entries)
        while waiting:
            key = waiting.pop()
            if key in self._entries and key not in kept and self._entries[key].references() == _FROM_HERE:
                items = self.forget(key)
                waiting += [self._keys[id(item)] for item in items if id(item) in self._keys]
                del items  # otherwise ``items`` would keep its contents alive
                self._released.append(key)
        return self._released

    def told(self) -> None:
        """Note that the other process knows what ``release`` returned."""
        self._released = []


def _same(one: list[Value], other: list[Value]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
