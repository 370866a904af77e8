"""Processes of the pool that die between two batches."""

from verl.utils.process_pool import DeadlinePool


def test_a_process_that_died_while_it_was_idle_is_replaced():
    pool = DeadlinePool(abs, 2)
    assert pool.map([(-1,), (-2,)], 60, 60) == [1, 2]
    victim = next(slot for slot in pool._slots if slot.call is None).process  # the other may still be starting
    victim.kill()
    victim.join(timeout=10)
    assert pool.map([(-3,), (-4,), (-5,)], 60, 60) == [3, 4, 5]
    pool.close()
