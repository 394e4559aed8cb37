"""The benchmark: the tables of arXiv:2105.14450, measured and set beside what was published.

``python -m bench --help`` lists the verbs.
"""

import os
import sys


def backend(words: list[str]) -> str:
    """What ``--backend NAME`` or ``--backend=NAME`` says, the last of them; "" without."""
    found = ""
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, value = word.partition("=")
        if option == "--backend":
            found = value if equals else following
    return found


# The array library has to be known before MPI starts (see `mm3d.arrays.cupy_backend.start`).
if backend(sys.argv):
    os.environ["MM3D_BACKEND"] = backend(sys.argv)
