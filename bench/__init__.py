"""The benchmark: the tables of arXiv:2105.14450, measured and set beside what was published.

``python -m bench --help`` lists the verbs.
"""

import os
import sys

# The array library has to be known before MPI starts (see `mm3d.gpu.start`).
if "--backend" in sys.argv[:-1]:
    os.environ["MM3D_BACKEND"] = sys.argv[sys.argv.index("--backend") + 1]
