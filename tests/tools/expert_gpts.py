"""GPTs with experts for tests, trained as in `gpts`."""
import functools

import gpts
import mm3d
from mm3d.model.experts.options import ExpertDesign

SIZES = dict(layers=2, hidden=12, heads=2, vocab=17, batch=6, seq=5)
CASES = [(mm3d.Experts(5, every=1, gate="mixtral", capacity=0.8, z=0.1, balance=0.1),
          2),
         (mm3d.Experts(7, top=3, every=2, capacity=None, z=0.1, balance=0.1), 1),
         (mm3d.Experts(4, top=2, every=2, gate="sigmoid-bias", capacity=0.9, order="choice",
                       design=ExpertDesign(7, 5, True, groups=2, top_groups=2, factor=1.5)), 1)]


def train(mesh, case: int, steps: int = 2, batch: int = 6, **options) -> dict:
    return gpts.train(mesh, **options_of(case, steps, batch), **options)


def options_of(case: int, steps: int, batch: int) -> dict:
    experts, microbatches = CASES[case]
    return dict(steps=steps, sizes=SIZES | {"batch": batch}, experts=experts,
                microbatches=microbatches)


@functools.cache
def serial(case: int, steps: int = 2, batch: int = 6) -> dict:
    return gpts.alone(**options_of(case, steps, batch))
