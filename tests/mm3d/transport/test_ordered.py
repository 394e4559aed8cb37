"""Sums in the order of the ranks have the same bits in every collective."""
import numpy as np
import pytest

from mm3d.arrays import backend
from mm3d.transport.ordered import OrderedTransport
from reference import integers
from rounded import dtype_of, ml_dtypes


@pytest.mark.ranks(4)
def test_a_sum_that_is_begun_early_has_the_bits_of_one_that_is_not(comm):
    """Also onto one rank: MPI would add in the order of a tree."""
    transport = OrderedTransport(comm, backend.get("numpy"))
    terms = np.random.default_rng(0).standard_normal((comm.size, 1000)).astype(np.float32)
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    for root in range(comm.size):
        for found in (transport.begin_reduce(terms[comm.rank], root).take(),
                      transport.reduce(terms[comm.rank], root)):
            assert (found is None) == (comm.rank != root)
            assert found is None or np.array_equal(found, expected)
    whole, narrow = integers((1000,), comm.rank), dtype_of("bfloat16" if ml_dtypes else "float16")
    found = transport.reduce(whole.astype(narrow), 1)
    assert found is None or np.array_equal(found, sum(
        integers((1000,), rank) for rank in range(comm.size)).astype(narrow))
    counts = [250] * comm.size
    own = slice(250 * comm.rank, 250 * (comm.rank + 1))
    for found in (transport.begin_reduce_scatter(terms[comm.rank], 0, counts).take(),
                  transport.reduce_scatter(terms[comm.rank], 0, counts)):
        assert np.array_equal(found, expected[own])
