"""Define policies of recomputation: which data forward saves, and which backward recomputes.

=============  =====================================================================  ============
policy         saved in each layer, beside parameters and their gradients             words a token
=============  =====================================================================  ============
``none``       all that backward reads                                                16 h
``selective``  the input of each norm, Q K V, and the input of GELU                   9 h
``full``       the layer's input                                                      h
``uniform:n``  the input of every n-th layer, the first of a recomputed group         h / n
=============  =====================================================================  ============

Words are those of activations where no rank stores copies; dry runs
(`mm3d.tracing.dry_run`) tell the exact numbers of words saved and moved and of operations.
``selective`` recomputes norms, attention and GELU, but no product with a weight.  Attention scores
are never saved, so recomputing attention alone would save only its output, h of 16 h, and is not
offered.  ``full`` and ``uniform:n`` repeat all of forward but the last product of each group of
layers, whose output is not needed.  During the backward of a group all data of its n layers are
stored; with ``uniform:n+selective`` only what ``selective`` saves.  ``full+selective`` is the same
with groups of one layer.

The names are Megatron-LM's (Korthikanti et al., arXiv 2205.05198).  Its
``--recompute-granularity selective`` recomputes attention, and with ``--recompute-modules`` also
norms and activation functions; its ``full`` with ``--recompute-method uniform
--recompute-num-layers n`` is ``uniform:n`` here, or ``full`` for n = 1.
"""

import math
from dataclasses import dataclass
from typing import Any

# In ascending order of recomputation, the order in which they are tried.
POLICIES = ("none", "selective", "full", "uniform:2", "uniform:3", "uniform:4", "uniform:6",
            "full+selective", "uniform:2+selective", "uniform:3+selective",
            "uniform:4+selective", "uniform:6+selective")


@dataclass(frozen=True)
class Policy:
    """Describe a policy of recomputation."""

    # Whether each linear layer and the layer before it are recomputed from their input.
    selective: bool = False
    # Number of layers that are recomputed together from the input of the first; 0 if whole layers
    # are not recomputed.
    group_size: int = 0

    def groups(self, layers: int) -> list[int]:
        """Return the sizes of the recomputed groups in a model of `layers` layers."""
        if not self.group_size:
            return []
        whole, rest = divmod(layers, self.group_size)
        return [self.group_size] * whole + [rest] * (rest > 0)


def parse_policy(name: str) -> Policy:
    """Return the policy called `name`, such as "none", "full" or "uniform:2+selective".

    Raises ValueError when there is no policy of that name.
    """
    whole_layers, plus, more = str(name).partition("+")
    size = {"full": "1"}.get(whole_layers, whole_layers.removeprefix("uniform:"))
    if not plus and whole_layers in ("none", "selective"):
        return Policy(selective=whole_layers == "selective")
    if (more == "selective" * bool(plus) and size.isascii() and size.isdecimal() and int(size)
            and whole_layers != size):
        return Policy(bool(more), int(size))
    raise ValueError(f"recompute={name!r} is unknown: choose none, selective, full, or uniform:n "
                     f"for the input of every n-th layer alone, such as uniform:2; of the last "
                     f"two also full+selective and uniform:n+selective")


def period_of(recompute: str, experts: Any = None) -> int:
    """Return the number of layers of a group, such that all groups are alike.

    Recomputation may keep the input of every n-th layer, and every n-th layer may have experts.
    """
    return math.lcm(parse_policy(recompute).group_size or 1, experts.every if experts else 1)
