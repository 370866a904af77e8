"""Several roles in one actor."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import registered_methods
from verl.single_controller.ray.resource_pool import RayClassWithInitArgs
from verl.utils.py_functional import temp_env_var

T = TypeVar("T")


class Roles:
    """The part of an actor that holds one worker per role."""

    class_dict: dict[str, RayClassWithInitArgs]

    def __init__(self) -> None:
        super().__init__()
        self.worker_dict = {role: _construct(cia) for role, cia in self.class_dict.items()}


def _determine_base(cls: type) -> type:
    """Return the first class named ``MegatronWorker`` or ``Worker`` in the method resolution order."""
    for base in cls.__mro__:
        if base.__name__ in ("MegatronWorker", "Worker"):
            return base
    raise ValueError(f"{cls.__name__} must derive from Worker to share an actor")


def _construct(cia: RayClassWithInitArgs) -> Worker:
    with temp_env_var("DISABLE_WORKER_INIT", "1"):
        return cia.raw_class(*cia.args, **cia.kwargs)


def _forward(role: str, name: str, method: Callable[..., T]) -> Callable[..., T]:
    """Return a method of the actor that calls the role's method of that name."""

    def call(self: Roles, *args: T, **kwargs: T) -> T:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    async def call_async(self: Roles, *args: T, **kwargs: T) -> T:
        return await getattr(self.worker_dict[role], name)(*args, **kwargs)

    forward: Callable[..., Any] = call_async if inspect.iscoroutinefunction(method) else call
    setattr(forward, MAGIC_ATTR, getattr(method, MAGIC_ATTR))
    return forward


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Build an actor class with one instance per role; method ``m`` of role ``k`` is called as ``k_m``."""
    classes = {role: cia.raw_class for role, cia in class_dict.items()}
    base = _determine_base(next(iter(classes.values())))
    worker_dict = type("WorkerDict", (Roles, base), {"class_dict": class_dict, "role_classes": classes})
    for role, cls in classes.items():
        for name, attrs in registered_methods(cls).items():
            direct = attrs["dispatch_mode"] == Dispatch.DIRECT_ROLLOUT_METHOD
            bound_name = name if direct and "rollout" in role else f"{role}_{name}"
            if direct and bound_name in vars(worker_dict):
                raise AssertionError(f"two roles have a direct method {name!r}: put them into different actors")
            setattr(worker_dict, bound_name, _forward(role, name, getattr(cls, name)))
    return RayClassWithInitArgs(cls=ray.remote(worker_dict))


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """Build the plain class of fused roles; each role is an attribute and can find the others."""
    classes = {role: cia.raw_class for role, cia in class_dict.items()}

    class FusedWorker(Worker):
        role_classes = classes

        def __init__(self) -> None:
            super().__init__()
            for role, cia in class_dict.items():
                self.fused_worker_dict[role] = _construct(cia)
                setattr(self, role, self.fused_worker_dict[role])
            for worker in self.fused_worker_dict.values():
                setattr(worker, Worker.fused_worker_attr_name, self.fused_worker_dict)

        def _find(self, method_name: str) -> Callable[..., Any]:
            role, _, name = method_name.partition("_fwmn_")
            if role not in self.fused_worker_dict:
                raise ValueError(f"no role {role!r} in {type(self).__name__}: it has {sorted(self.fused_worker_dict)}")
            return getattr(self.fused_worker_dict[role], name)

        def _fuw_execute(self, method_name: str, *args: T, **kwargs: T) -> T:
            return self._find(method_name)(*args, **kwargs)

    async def _fuw_execute_async(self: FusedWorker, method_name: str, *args: T, **kwargs: T) -> T:
        result = self._find(method_name)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    members: dict[str, Any] = {}
    if any(
        inspect.iscoroutinefunction(getattr(cls, name)) for cls in classes.values() for name in registered_methods(cls)
    ):
        members["_fuw_execute"] = _fuw_execute_async
    return type("_".join(["FusedWorker", *class_dict]), (FusedWorker,), members)


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Build an actor class of fused roles."""
    cia = RayClassWithInitArgs(cls=ray.remote(create_colocated_worker_raw_cls(class_dict)))
    cia.fused_worker_used = True
    return cia
