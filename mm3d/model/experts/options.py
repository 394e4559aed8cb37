"""Define the options of mixture-of-experts layers, and check them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm3d.arrays.plain_numbers import PlainFields, check_types, check_whole, is_number, said
from mm3d.names import check_name

GATES = "switch", "mixtral", "gshard", "sigmoid-bias"
ORDERS = "position", "choice"
CONVENTIONS = "mm3d", "megatron", "deepspeed", "megablocks", "huggingface"
DEEPSPEED_MIN_CAPACITY = 4    # the default of DeepSpeed's layer
BEST_OF_GROUP = 2    # whose scores are summed up to those of a group


@dataclass(frozen=True)
class ExpertDesign(PlainFields):
    """State what a layer of experts has beside those of Switch and Mixtral; by default nothing.

    Attributes
    ----------
    width : int, optional
        Features between the products of an expert; by default those of the architecture's
        perceptron.
    shared : int, optional
        Features between the products of a *shared expert*, which every token goes to; its output
        is added to that of the others (Dai et al., arXiv 2401.06066).  Several shared experts
        are one of their joint width.  By default there is none.
    shared_gate : bool
        Whether the output of the shared expert is multiplied by the sigmoid of a product of the
        token with a vector, as in Qwen's models with experts.
    groups, top_groups : int
        The experts are divided into groups of neighbours, and a token goes to experts of the
        `top_groups` groups alone whose two best experts have the largest sum of scores, bias
        included: only with the gate "sigmoid-bias" (DeepSeek-AI, arXiv 2412.19437, section
        2.1.2).
    factor : float
        What the gates are multiplied by at last.
    """

    width: int | None = said("features between the products of an expert", None, least=1,
                             nothing=": those of the perceptron", option="expert-width")
    shared: int | None = said("the same of an expert that every token goes to", None, least=1,
                              nothing=": none", option="shared-expert")
    shared_gate: bool = said("multiply the shared expert's output by the sigmoid of a product "
                             "with the token", False)
    groups: int = said("groups of experts, of which a token goes to the best, with --gate "
                       "sigmoid-bias", 1, least=1, option="expert-groups")
    top_groups: int = said("groups that a token goes to", 1, least=1, option="expert-top-groups")
    factor: float = said("what gates are multiplied by at last", 1.0, above=True,
                         option="expert-factor")

    def check(self, count: int, top: int, gate: str) -> None:
        """Raise ValueError unless options with this `count`, `top` and `gate` can have it."""
        for name in ("width", "shared", "groups", "top_groups"):
            value = getattr(self, name)
            if value is not None or name.endswith("groups"):
                check_whole(name, value)
        check_types(self)
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate=True without a shared expert: shared=1024 would do, or "
                             "shared_gate=False")
        if not is_number(self.factor) or not 0 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor!r} should be a number above 0")
        self._check_groups(count, top, gate)

    def _check_groups(self, count: int, top: int, gate: str) -> None:
        """Raise ValueError unless groups divide the experts, and enough are chosen."""
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups={self.top_groups} of groups={self.groups} cannot be "
                             f"chosen: top_groups={self.groups} at most would do")
        if self.groups == 1:
            return
        if gate != "sigmoid-bias":
            raise ValueError(f"groups={self.groups} with gate={gate!r}: gate='sigmoid-bias', or "
                             f"groups=1, would do")
        if count % self.groups:
            near = [n for n in range(1, count + 1) if count % n == 0]
            raise ValueError(f"groups={self.groups} do not divide count={count} experts: "
                             f"{', '.join(map(str, near))} would do")
        held = self.top_groups * (count // self.groups)
        if top > held:
            raise ValueError(f"top={top} experts cannot be chosen in top_groups={self.top_groups} "
                             f"groups of {count // self.groups}: top={held} at most would do")


PLAIN_DESIGN = ExpertDesign()


@dataclass(frozen=True)
class ExpertOptions(PlainFields):
    """Hold the options of a model's mixture-of-experts layers; see `mm3d.Experts`.

    Attributes
    ----------
    count : int
        Number of experts E of such a layer.
    top : int
        Number of experts k that a token is sent to.
    every : int
        Period of the layers with experts in place of the multi-layer perceptron: with 2 the
        layers 1, 3, and so on, counted from 0; with 1 all of them.
    capacity : float or None
        Capacity factor: how many tokens an expert takes, as a multiple of what it gets when all
        experts get equally many.  A token beyond that is dropped: the expert adds nothing to it.
        None drops no token.
    gate : str
        What a chosen expert's output is multiplied by.  "switch": its probability, the softmax
        over all experts' logits (Fedus, Zoph and Shazeer, arXiv 2101.03961).  "mixtral": the
        softmax over the chosen experts' logits (Jiang et al., arXiv 2401.04088).  "gshard": the
        same; but all first choices are taken before any second choice (Lepikhin et al., arXiv
        2006.16668).  "sigmoid-bias": the logits' sigmoids, divided by their sum over the chosen
        experts, which are chosen by the sigmoid plus a bias that no gradient changes
        (DeepSeek-AI, arXiv 2412.19437).
    balance : float
        Coefficient of the balance loss, as `convention` defines it.
    z : float
        Coefficient of the z-loss, the mean squared log-sum-exp of a token's logits (Zoph et al.,
        arXiv 2202.08906).
    convention : str
        Whose definitions of capacity and balance loss are used: "mm3d", "megatron", "deepspeed",
        "megablocks" or "huggingface"; ``README.rst`` of this folder compares them.
    min_capacity : int, optional
        Smallest number of tokens that an expert takes; by default the convention's.
    order : str, optional
        Which tokens an expert takes: "position", the first in the global batch, or "choice", all
        tokens with it as their first choice before tokens with it as their second.  By default
        "choice" with the gate "gshard", and with two choices under the convention "deepspeed";
        otherwise "position".
    bias_rate : float
        How much a step changes the bias of the gate "sigmoid-bias".
    design : ExpertDesign
        Widths, shared experts and groups of experts.
    """

    count: int = said("put N experts in place of the perceptron of some layers", least=1,
                      option="experts")
    top: int = said("experts that a token is sent to", 2, least=1, option="expert-top")
    every: int = said("one layer of so many has experts, with 1 all", 2, least=1,
                      option="expert-every")
    capacity: float | None = said("tokens that an expert takes, as a multiple of an equal share, "
                                  "or none for all", 1.25, letter="X")
    gate: str = said("what multiplies the outputs of experts", "switch", choices=GATES)
    balance: float = said("coefficient of the balance loss", 1e-2)
    z: float = said("coefficient of the router's z-loss", 1e-3, option="z-loss")
    convention: str = said("whose definitions of capacity and balance loss are used", "mm3d",
                           choices=CONVENTIONS)
    min_capacity: int | None = said("tokens that an expert takes at least", None, least=0,
                                    nothing="4 with --convention deepspeed, else 0")
    order: str | None = said(
        "whose tokens a full expert drops: the last ones by position, or second choices before "
        "first ones", None, choices=ORDERS, option="expert-order",
        nothing="choice with --gate gshard, and with --convention deepspeed --expert-top 2; else "
                "position")
    bias_rate: float = said("by how much a step changes the bias of --gate sigmoid-bias", 1e-3)
    design: ExpertDesign = said("widths, shared experts and groups of experts", PLAIN_DESIGN,
                                option="")

    @property
    def dropping_order(self) -> str:
        """Return the order in which an expert takes tokens: `order`, or the default."""
        by_choice = self.gate == "gshard" or self.convention == "deepspeed" and self.top == 2
        return self.order or ("choice" if by_choice else "position")

    @property
    def least_capacity(self) -> int:
        """Return the smallest number of tokens that an expert takes, given or by convention."""
        if self.min_capacity is not None:
            return self.min_capacity
        return DEEPSPEED_MIN_CAPACITY if self.convention == "deepspeed" else 0

    def in_layer(self, layer: int) -> bool:
        """Return whether the layer of this number, counted from 0, has experts."""
        return layer % self.every == self.every - 1

    def check(self) -> None:
        """Raise ValueError unless the options are possible, naming the first that is not."""
        for name in ("count", "top", "every"):
            check_whole(name, getattr(self, name))
        if self.min_capacity is not None:
            check_whole("min_capacity", self.min_capacity, 0)
        if self.top > self.count:
            raise ValueError(f"top={self.top} experts cannot be chosen among count={self.count}: "
                             f"top={self.count} at most would do")
        check_name("gate", self.gate, GATES)
        check_name("convention", self.convention, CONVENTIONS)
        if self.order is not None:
            check_name("order", self.order, ORDERS)
        for name in ("balance", "z", "bias_rate"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} should be a number of at least 0")
        self._check_capacity()
        if not isinstance(self.design, ExpertDesign):
            raise ValueError(f"design={self.design!r} should be mm3d.ExpertDesign(...), such as "
                             f"mm3d.ExpertDesign(shared=1024)")
        self.design.check(self.count, self.top, self.gate)

    def _check_capacity(self) -> None:
        """Raise ValueError unless experts can take tokens, and the convention knows capacities."""
        if self.capacity is None:
            return
        if not is_number(self.capacity) or not 0 < self.capacity < math.inf:
            raise ValueError(f"capacity={self.capacity!r} drops every token: a factor above 0, "
                             f"such as 1.25, or None to drop none would do")
        if self.convention == "huggingface":
            raise ValueError(f"capacity={self.capacity!r}: Hugging Face's Mixtral drops no token; "
                             f"with convention='huggingface' capacity=None would do")

    def check_tokens(self, tokens: int) -> None:
        """Raise ValueError unless the choices of so many tokens, globally, can be counted."""
        limit = np.iinfo(np.int64).max
        if tokens * self.top > limit:
            raise ValueError(f"tokens={tokens} with top={self.top} are {tokens * self.top} "
                             f"choices, which overflow 64 bits: at most {limit // self.top} "
                             f"tokens would do")


def check_experts_given(experts: Any, layers: Any = None) -> None:
    """Check the argument `experts` of a model, perhaps of so many `layers`; None is right too.

    Raises ValueError unless it is None, or `mm3d.Experts` whose options are possible; when no
    layer has them.
    """
    if experts is None:
        return
    if not isinstance(experts, ExpertOptions):
        raise ValueError(f"experts={experts!r} should be mm3d.Experts(...), such as "
                         f"mm3d.Experts(8), or None")
    experts.check()
    if isinstance(layers, int) and 1 <= layers < experts.every:
        raise ValueError(f"experts in one of every={experts.every} layers are in none of "
                         f"layers={layers}: every=1 would do")
