"""The pools that tools of forks run their work in."""

import importlib
import time
from typing import Any

import pytest
import ray

from verl.tools.sandbox_fusion_tools import PoolMode, TokenBucketWorker, init_execution_pool


@pytest.fixture
def limiter(ray_cluster: None) -> Any:
    """Return the limiter that the pools of this test share."""
    worker = TokenBucketWorker.options(name="rate-limiter", get_if_exists=True).remote(2)
    yield worker
    ray.kill(worker)


def test_a_pool_runs_functions_within_the_limit(limiter: Any, tmp_path: Any) -> None:
    def work(name: str) -> int:
        """Return how many of us run, once two do; the third must wait for a place."""
        (tmp_path / name).touch()
        while not {"a", "b"} <= {path.name for path in tmp_path.iterdir()}:
            time.sleep(0.01)
        count = ray.get(ray.get_actor("rate-limiter").get_current_count.remote())
        return count

    pool = init_execution_pool(num_workers=4, rate_limit=9)  # the limiter is there already
    assert ray.get(pool.ping.remote())
    counts = ray.get([pool.execute.remote(work, name) for name in "ab"])
    assert max(counts) == 2
    assert ray.get(pool.execute.remote(lambda *values, by: sum(values) * by, 1, 2, by=3)) == 9
    assert ray.get(pool.execute.remote(lambda: 1 / 0)) is None
    ray.get([limiter.acquire.remote() for _ in range(2)])  # all places are free again
    waiting = pool.execute.remote(lambda: "at last")
    done, _ = ray.wait([waiting], timeout=0.2)
    assert not done and ray.get(limiter.get_current_count.remote()) == 2
    ray.get(limiter.release.remote())
    assert ray.get(waiting) == "at last"
    ray.kill(pool)


def test_a_pool_without_a_limit(ray_cluster: None) -> None:
    pool = init_execution_pool(num_workers=1, enable_global_rate_limit=False, mode=PoolMode.ThreadMode)
    assert ray.get(pool.execute.remote(str.upper, "a")) == "A"
    with pytest.raises(ValueError):
        ray.get_actor("rate-limiter")
    ray.kill(pool)


def test_processes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"write mode=PoolMode\.ThreadMode"):
        init_execution_pool(num_workers=1, mode=PoolMode.ProcessMode)


@pytest.mark.parametrize(
    ("module", "pool"),
    [("search_tool", "init_search_execution_pool"), ("image_zoom_in_tool", "init_visual_execution_pool")],
)
def test_other_tools_have_the_same(module: str, pool: str) -> None:
    found = importlib.import_module(f"verl.tools.{module}")
    assert (getattr(found, pool), found.PoolMode) == (init_execution_pool, PoolMode)
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018
