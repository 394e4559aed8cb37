"""Choose the GPU of each rank of a node."""

import os

ORDER_VARIABLE = "MM3D_GPU_ORDER"


def gpu_of_rank(number: int, gpus: int) -> int:
    """Return the GPU of the rank of this `number` on its node, which sees so many `gpus`.

    With ``MM3D_GPU_ORDER=3,2,1,0`` rank 0 of a node has GPU 3, and so on: nodes may join a
    processor's first cores to their last GPU.  Where there are more ranks than GPUs, they are
    assigned in turn.  Raises ValueError when that order does not name each of these GPUs once.
    """
    order = os.environ.get(ORDER_VARIABLE, "")
    if not order:
        return number % gpus
    numbers = [int(text) if text.isdecimal() else -1 for text in order.split(",")]
    if sorted(numbers) != list(range(gpus)):
        raise ValueError(f"{ORDER_VARIABLE}={order!r}: give the numbers of the {gpus} GPUs that a "
                         f"rank sees, {','.join(map(str, range(gpus)))} in the order of the ranks "
                         "of a node")
    return numbers[number % gpus]
