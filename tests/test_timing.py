"""What is timed and what is not."""
import time

import numpy as np
import pytest

from mm3d import timing


@pytest.mark.ranks(1, 4)
def test_samples_of_every_rank_without_warm_up(comm):
    calls = []

    def forward():
        calls.append("forward")
        # The second step, the first that counts, is the slow one; the warm-up is slower still.
        time.sleep({1: 0.2, 2: 0.05}.get(calls.count("forward"), 0.0))
        return calls.count("forward")

    def backward(saved):
        assert saved == calls.count("forward")
        calls.append("backward")
        time.sleep(0.05 if comm.rank == comm.size - 1 else 0.0)

    samples = timing.measure(forward, backward, comm, lambda: calls.append("idle"), 1, 3,
                             lambda: calls.append("prepare"))
    step = ["prepare", "idle", "forward", "idle", "idle", "backward", "idle"]
    assert calls == 4 * step
    if comm.rank:
        assert samples is None
        return
    assert samples["forward"].shape == samples["backward"].shape == (3, comm.size)
    assert 0.05 <= samples["forward"][0].min() and samples["forward"].max() < 0.2
    assert (samples["backward"][:, -1] >= 0.05).all()
    assert timing.typical(samples["backward"]) >= 0.05


def test_statistics():
    samples = {"forward": np.array([[1.0, 2.0], [5.0, 4.0], [3.0, 0.0]]),
               "backward": np.array([[6.0, 6.0], [7.0, 9.0], [8.0, 1.0]])}
    assert timing.slowest(samples["forward"]).tolist() == [2, 5, 3]
    assert timing.typical(samples["forward"]) == 3
    assert timing.average_step_time(samples, 4) == (3 + 8) / 4


@pytest.mark.ranks(1)
def test_nothing_to_measure(comm):
    for warmup, repetitions in ((0, 0), (-1, 1)):
        with pytest.raises(ValueError, match="at least one repetition"):
            timing.measure(lambda: None, lambda saved: None, comm, lambda: None, warmup,
                           repetitions)
