"""Worker groups of Ray actors."""

from verl.single_controller.ray.colocated import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from verl.single_controller.ray.resource_pool import (
    RayClassWithInitArgs,
    RayResourcePool,
    extract_pg_from_exist,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
)
from verl.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
]
