"""Define policies of recomputation: which data are kept from forward, and which computed again.

=============  =====================================================================  ============
policy         kept of each layer, beside parameters and their gradients              words a token
=============  =====================================================================  ============
``none``       all that backward reads                                                16 h
``selective``  the input of each norm, Q K V, and the input of GELU                   9 h
``full``       the layer's input                                                      h
``uniform:n``  the input of every n-th layer, from which n layers are computed again  h / n
=============  =====================================================================  ============

Words are those of activations where no rank holds a copy; what is sent, computed and kept exactly
is stated by `mm3d.model.cost`.  With ``selective`` no product with a weight is computed again, but
the norms, attention and GELU.  Scores of attention are never kept, so attention alone would save
only its output, one h of 16, and is no policy of its own.  ``full`` and ``uniform:n`` repeat all
of forward but the last product of each group of layers, whose output nothing needs.  While the
backward of a group lasts, all is kept of its n layers; with ``uniform:n+selective`` what
``selective`` keeps, and ``full+selective`` is that of groups of one layer.

The names are Megatron-LM's (Korthikanti et al., arXiv 2205.05198): ``--recompute-granularity
selective``, there of attention, with ``--recompute-modules`` also of norms and activations, and
``full`` with ``--recompute-method uniform --recompute-num-layers n``, for which n = 1 is ``full``
here.
"""

from typing import NamedTuple

# From the one that computes least again, as a choice among them tries them.
POLICIES = ("none", "selective", "full", "uniform:2", "uniform:3", "uniform:4", "uniform:6",
            "full+selective", "uniform:2+selective", "uniform:3+selective",
            "uniform:4+selective", "uniform:6+selective")


class Policy(NamedTuple):
    """Describe a policy of recomputation.

    Attributes
    ----------
    selective : bool
        Whether each linear layer and the one before it are computed again from their input.
    every : int
        Of so many layers the first one's input is kept; 0 where layers are not computed again.
    """

    selective: bool = False
    every: int = 0

    @property
    def period(self) -> int:
        """Return the number of layers after which the pattern of kept data repeats."""
        return max(1, self.every)

    def groups(self, layers: int) -> list[int]:
        """Return the sizes of the groups of layers that are computed again from their input."""
        if not self.every:
            return []
        whole, rest = divmod(layers, self.every)
        return [self.every] * whole + [rest] * (rest > 0)


def policy(name: str) -> Policy:
    """Return the policy called `name`.

    Raises
    ------
    ValueError
        When there is none of that name.
    """
    chosen, plus, more = str(name).partition("+")
    every = {"full": "1"}.get(chosen, chosen.removeprefix("uniform:"))
    if not plus and chosen in ("none", "selective"):
        return Policy(selective=chosen == "selective")
    if (more == "selective" * bool(plus) and every.isascii() and every.isdecimal() and int(every)
            and chosen != every):
        return Policy(bool(more), int(every))
    raise ValueError(f"recompute={name!r} is unknown: choose none, selective, full, or uniform:n "
                     f"for the input of every n-th layer alone, such as uniform:2; of the last "
                     f"two also full+selective and uniform:n+selective")
