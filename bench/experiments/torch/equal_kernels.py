"""Measure the same local products by one thread of mm3d and of PyTorch, before both are compared.

The ratio of steps that remains when both multiply equally fast is not due to kernels.
"""

import json
from functools import partial
from typing import Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from bench.experiments.torch.child import TorchProcesses
from bench.experiments.torch.serve import TimedProduct, product_seconds
from bench.instruments.sampling import compare_in_turns, time_alone
from bench.instruments.timing import Limits
from bench.records.model_run import Numbers
from mm3d.arrays.backend import Backend

LIMITS = Limits(5, 15, 10.0)
SIDES = ("mm3d", "PyTorch")


def compare_kernels(products: Sequence[TimedProduct], dtype: str, backend: Backend,
                    reference: TorchProcesses, seed: int, torch_flops: float) -> Numbers:
    """Measure products by one thread of rank 0 and one of PyTorch's, in turns.

    Parameters
    ----------
    products : sequence of TimedProduct
        The products of rank 0 in a step; every rank calls this.
    torch_flops : float
        The operations of PyTorch's step.

    Returns
    -------
    Numbers
        For the record on rank 0: the seconds of (`SIDES`, rounds), their operations and those of
        PyTorch's step, and the cores that its processes can use; {} where the products are a
        device's, or there are none.

    Raises
    ------
    UsageError
        On all ranks, when PyTorch's process has ended.
    """
    comm = reference.comm
    if not comm.bcast(bool(products) and backend.host_buffers):
        return {}

    def mine() -> float:
        with threadpool_limits(1, user_api="blas"):
            return product_seconds(
                products, lambda *shape: backend.asarray(np.ones(shape, dtype)),
                lambda a, b, out: backend.xp.matmul(a, b, out=out))

    def theirs() -> float:
        text = json.dumps(products, separators=(",", ":"))
        return reference.answer("products", dtype, text)["seconds"]

    found, _ = compare_in_turns({side: partial(time_alone, measure, comm)
                                 for side, measure in zip(SIDES, (mine, theirs))},
                                LIMITS, seed, comm)
    return {"s": {"product_samples": [[one.seconds for one in found[side]] for side in SIDES]},
            "1": {"product_flops": sum(2 * rows * n * columns * count
                                       for rows, n, columns, *_, count in products),
                  "torch_flops": float(torch_flops), "torch_cores": reference.cores}}


def gpt_step_flops(tokens: int, layers: int, hidden: int, seq: int, vocab: int = 0,
                   causal: bool = False, wide: float = 4.0) -> float:
    """Compute the operations of the products of a training step of a GPT, or of its layers.

    `wide` is the width of the MLP over that of a token; with experts, of all those of a token.
    """
    scores = seq / 2 if causal else seq
    layer = (4 + 2 * wide) * hidden ** 2 + 2 * scores * hidden
    return 6.0 * tokens * (layers * layer + vocab * hidden)
