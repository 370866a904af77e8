"""The type of a handle of a Ray actor; Ray itself types each of its methods as ``Never``."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ray import ActorID, ObjectRef

    Ref = ObjectRef[Any]
    """The reference to a result, whose type the class of the actor decides."""


class RemoteMethod(Protocol):
    """A method of an actor, as its callers see it."""

    def options(self, **options: str | int | float | bool | None) -> "RemoteMethod":
        """Return the method with other options of Ray."""
        ...

    def remote(self, *args: Any, **kwargs: Any) -> "Ref":
        """Start the method and return the reference to its result."""
        ...


class Actor(Protocol):
    """A handle of an actor; the class of the actor decides which methods it has."""

    @property
    def _actor_id(self) -> "ActorID": ...

    def __getattr__(self, name: str) -> RemoteMethod: ...
