"""Measure the tables of arXiv:2105.14450 and set them beside the published ones.

``python -m bench --help`` lists the verbs.
"""

import os
import sys


def backend_option(words: list[str]) -> str:
    """Read ``--backend NAME`` or ``--backend=NAME``, the last of them; "" without."""
    found = ""
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, value = word.partition("=")
        if option == "--backend":
            found = value if equals else following
    return found


# The array library has to be known before MPI starts (see
# `mm3d.arrays.cupy_backend.create_device_context`).
if backend_option(sys.argv):
    os.environ["MM3D_BACKEND"] = backend_option(sys.argv)
