"""Check the loads of links, and the delays of chains, against enumeration and simulation."""

import itertools

import numpy as np
import pytest

from bench.prediction.seconds import chain_delay, link_level
from mm3d.tracing.events import Collective
from mm3d.transport.lanes import chunk_bytes


def fullest(size: int, stride: int, per_node: int, root: int | None) -> float:
    """Return the most arrays that a node receives in a gather, or that it receives or sends in a
    broadcast by number `root` of each line."""
    ranks = range(np.lcm(size * stride, per_node))
    received = dict.fromkeys((rank // per_node for rank in ranks), 0.0)
    sent = dict(received)
    for first in ranks:
        if first // stride % size:
            continue
        line = [(first + i * stride) // per_node for i in range(size)]
        for node in set(line):
            if root is None:
                received[node] += sum(other != node for other in line) / size
            elif line[root] != node:
                received[node] += 1
                sent[line[root]] = sent[line[root]] + 1 / (len(set(line)) - 1)
    return max(*received.values(), *sent.values())


@pytest.mark.parametrize("size, stride, per_node", [(6, 1, 4), (3, 1, 4), (6, 6, 4), (3, 2, 8),
                                                    (5, 3, 4), (9, 1, 6)])
def test_a_link_carries_what_passes_through_the_fullest_node(size, stride, per_node):
    level, load = link_level(size, stride, per_node, "shared hierarchical")
    assert level == "network"
    assert load * (size - 1) / size == pytest.approx(fullest(size, stride, per_node, None))
    expected = np.mean([fullest(size, stride, per_node, root) for root in range(size)])
    assert link_level(size, stride, per_node, rooted=True)[1] == pytest.approx(expected)


def test_six_by_six_on_nodes_of_four_by_hand():
    # The second node has two ranks of the first line and two of the second: each line sends it
    # four of its six blocks.
    assert link_level(6, 1, 4, "hierarchical") == ("network", pytest.approx(8 / 5))
    assert link_level(6, 1, 4) == ("network", 2)    # two rings
    # Of six roots two leave that node with one array to receive, two with two, and two with one.
    assert link_level(6, 1, 4, rooted=True) == ("network", pytest.approx(8 / 6))


def test_lines_that_fill_nodes_are_as_before():
    assert link_level(8, 1, 4) == ("network", 1.0)
    assert link_level(8, 8, 4) == ("network", 4.0)
    assert link_level(4, 1, 4) == ("node", 1.0)
    # A node of four gathers from another four of eight blocks, a ring seven.
    assert link_level(8, 1, 4, "hierarchical") == ("network", pytest.approx(4 / 7))
    assert link_level(2, 8, 8) == ("network", 8.0)


def summa_seconds(q: int, chunks: int) -> float:
    """Simulate C = A B by SUMMA, each rank a node, with arrays that take a second to pass on.

    A node passes a chunk on as it has come; a root begins when it has ended what came before.
    """
    ready = np.zeros((q, q))
    for t, along_rows in itertools.product(range(q), (True, False)):
        view = ready if along_rows else ready.T
        for line in view:
            ended = line[t] + 1
            line[t] = ended
            for place in range(1, q):
                node = (t + place) % q
                ended = max(ended + 1 / chunks, line[node])
                line[node] = ended
    return float(ready.max())


@pytest.mark.parametrize("q", [3, 4, 6, 8])
@pytest.mark.parametrize("length", [30_000, 100_000, 1_000_000])
def test_a_product_in_chains_takes_as_long_as_simulated(q, length):
    event = Collective("broadcast", "x", q, 4, length)
    chunks = length / chunk_bytes(length, q)
    predicted = 2 * q * (1 + chain_delay(event, 4))
    assert predicted == pytest.approx(summa_seconds(q, chunks), rel=0.03)
    assert predicted > 2 * q * 1.02


def test_only_broadcasts_over_three_nodes_wait():
    assert chain_delay(Collective("broadcast", "x", 2, 4, 10 ** 6), 4) == 0
    assert chain_delay(Collective("all_gather", "x", 8, 4, 10 ** 6), 4) == 0
    assert chain_delay(Collective("broadcast", "x", 8, 4, 10 ** 4), 4) == 0.75    # 2 * 7 / 8 - 1
    assert chain_delay(Collective("reduce", "x", 8, 4, 10 ** 6), 4) > 0
