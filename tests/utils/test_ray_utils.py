"""Helpers around Ray."""

from verl.utils.ray_utils import parallel_put, ray_noset_visible_devices


def test_noset_visible_devices() -> None:
    assert not ray_noset_visible_devices({})
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})


def test_parallel_put_keeps_order(ray_cluster: None) -> None:
    import ray

    for workers in (None, 1, 3):
        assert ray.get(parallel_put(list(range(5)), workers), timeout=30) == list(range(5))


def test_parallel_put_of_nothing_needs_no_cluster() -> None:
    assert parallel_put([]) == []
