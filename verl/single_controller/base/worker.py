"""The worker: the process that a role runs in."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.base.decorator import DistGlobalInfo as DistGlobalInfo
from verl.single_controller.base.decorator import DistRankInfo as DistRankInfo
from verl.utils import envs
from verl.utils.device import get_visible_devices_keyword
from verl.utils.import_utils import deprecated
from verl.utils.net_utils import get_free_port
from verl.utils.process.lifetime import die_with_parent
from verl.utils.profiler.results import files_of_this_process, run_command
from verl.utils.ray_utils import ray_noset_visible_devices

if TYPE_CHECKING:
    from verl.utils.profiler.profile import DistProfiler, RoleProfilers

P = ParamSpec("P")
T = TypeVar("T")


class WorkerHelper:
    """Address and free port of the node."""

    @staticmethod
    def get_available_master_addr_port() -> tuple[str, str]:
        """Return this node's address and a free port for a rendezvous."""
        import ray

        return ray.util.get_node_ip_address().strip("[]"), str(get_free_port())  # without the brackets of IPv6

    @staticmethod
    @deprecated("get_available_master_addr_port")
    def get_availale_master_addr_port() -> tuple[str, str]:
        """Call ``get_available_master_addr_port`` by the misspelt name of the established verl interface."""
        return WorkerHelper.get_available_master_addr_port()


class Worker(WorkerHelper):
    """A process of a worker group. Roles derive from it and register their methods.

    ``seconds_by_call`` adds up the seconds in each registered method; the reader clears it.
    """

    # Workers of users call every public method, also those that nothing in this repository calls.

    fused_worker_attr_name = "fused_worker_dict"

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if envs.read("WG_BACKEND") == "ray":
            die_with_parent()
        if cuda_visible_devices is not None:
            envs.write({get_visible_devices_keyword(): cuda_visible_devices})
        self._setup_env_cuda_visible_devices()
        self._world_size = envs.integer("WORLD_SIZE", 1)
        self._rank = envs.integer("RANK", 0)
        envs.write_default({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        address = envs.read("MASTER_ADDR")
        if address is not None:
            envs.write({"MASTER_ADDR": address.strip("[]"), "REDIS_STORE_SERVER_HOST": address.strip("[]")})
        self.fused_worker_dict: dict[str, Worker] = {}
        self.seconds_by_call: dict[str, float] = {}
        self.__meshes: dict[str, tuple[int, bool]] = {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that tell a worker its place in the group."""
        names = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*names, get_visible_devices_keyword().upper()]

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._world_size

    @property
    def rank(self) -> int:
        """Rank of this worker in the group."""
        return self._rank

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Return address and port of the group's rendezvous."""
        return envs.read("MASTER_ADDR"), envs.read("MASTER_PORT")

    def get_cuda_visible_devices(self) -> str:
        """Return the devices that this process sees, or ``not set``."""
        return envs.read(get_visible_devices_keyword().upper(), "not set") or ""

    def get_fused_worker_by_name(self, worker_name: str) -> "Worker | None":
        """Return the role of that name in the same process."""
        return self.fused_worker_dict.get(worker_name)

    def _setup_env_cuda_visible_devices(self) -> None:
        """Fold the variables of visible devices into one; set the local rank if Ray leaves all devices visible."""
        hip = envs.read("HIP_VISIBLE_DEVICES")
        cuda = envs.read("CUDA_VISIBLE_DEVICES")
        rocr = envs.read("ROCR_VISIBLE_DEVICES")
        if hip and cuda and hip != cuda:
            raise ValueError(f"HIP_VISIBLE_DEVICES={hip!r} and CUDA_VISIBLE_DEVICES={cuda!r} disagree: set one of them")
        if rocr and (hip or cuda):
            raise ValueError("ROCR_VISIBLE_DEVICES is set with CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES: unset one")
        for name, devices in (("HIP_VISIBLE_DEVICES", hip), ("ROCR_VISIBLE_DEVICES", rocr)):
            if devices:
                envs.remove(name)
                envs.write({"CUDA_VISIBLE_DEVICES": devices})
        if ray_noset_visible_devices() and envs.read("WG_BACKEND") == "ray":
            self._take_local_rank_of_accelerator()

    def _take_local_rank_of_accelerator(self) -> None:
        import ray

        from verl.utils.device import get_device_name, get_torch_device

        if get_device_name() == "cpu":
            return
        ids = ray.get_runtime_context().get_accelerator_ids()
        mine = ids.get("NPU" if get_device_name() == "npu" else "GPU", [])
        if mine:
            # Ray names the device as CUDA_VISIBLE_DEVICES does, torch by its place among the visible ones.
            visible = (envs.read(get_visible_devices_keyword()) or "").split(",")
            local_rank = visible.index(mine[0]) if mine[0] in visible else int(mine[0])
            envs.write({"LOCAL_RANK": str(local_rank)})
            get_torch_device().set_device(local_rank)

    # ---- mesh dispatch

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register the part of a batch that this worker takes on a mesh, and whether its output is collected.

        Raises: ValueError when the mesh is registered already.
        """
        if mesh_name in self.__meshes:
            raise ValueError(f"mesh {mesh_name!r} is registered already")
        self.__meshes[mesh_name] = (dp_rank, is_collect)

    def _mesh(self, name: str) -> tuple[int, bool]:
        if name not in self.__meshes:
            raise ValueError(
                f"{type(self).__name__} has no mesh {name!r}, it has {sorted(self.__meshes)}: "
                "call _register_dispatch_collect_info first"
            )
        return self.__meshes[name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self._mesh(mesh_name)[1]

    # ---- functions from the driver

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[Concatenate[Self, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call ``func(self, ...)`` on this worker's part of the batches."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``func(...)`` on rank zero."""
        return func(*args, **kwargs)


class DistProfilerExtension:
    """A mixin of workers; ``profiler`` is None if nothing is profiled."""

    profiler: "DistProfiler | RoleProfilers | None" = None

    def __init__(self, profiler: "DistProfiler | RoleProfilers | None" = None) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Begin a step; see ``DistProfiler.start``."""
        if self.profiler is not None:
            self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End the step and write the capture."""
        if self.profiler is not None:
            self.profiler.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def profile_files(self, folder: str) -> dict[str, int]:
        """Return the files below ``folder`` of this node that are younger than this process, with sizes in bytes."""
        return files_of_this_process(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_profile_files(self, folder: str, names: dict[int, list[str]]) -> dict[str, bytes]:
        """Return the contents of the files in ``folder`` that ``names`` lists for this rank."""
        return {name: Path(folder, name).read_bytes() for name in names.get(self.rank, ())}  # type: ignore[attr-defined]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run_profile_command(self, command: str, folder: str, ranks: list[int] | None) -> None:
        """Run a shell command on the given ranks; None means all ranks."""
        rank: int = self.rank  # type: ignore[attr-defined]
        if ranks is None or rank in ranks:
            run_command(command, Path(folder), rank)
