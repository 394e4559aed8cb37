"""Test rules of thumb: the mesh that each names, beside the planner's choice for as many GPUs.

A rule says how many ranks tensor parallelism, the pipeline and the replicas have.  What it leaves
open is chosen twice: plainly (`SIMPLE`), and by the planner within the mesh.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator

import msgspec

from bench.errors import UsageError
from bench.prediction.machine_model import Machine
from bench.prediction.memory_fit import state_by_kind
from bench.prediction.model_file import ModelFile, load_model
from bench.prediction.training_plans.choices import Choice, KIND_TITLES, Training
from bench.prediction.training_plans.search import Search, TrainingPlan
from bench.text_files import read_described
from mm3d.grid.shape import GridShape

SIMPLE = {"zero": 0, "schedule": "1f1b", "micro": 1, "recompute": "full"}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of thumb for models of a size.

    Attributes
    ----------
    size, model : str
        The size as printed, and the model of that size.
    tensor : tuple of int
        Ranks of tensor parallelism, one for each mesh that the rule allows.
    stages, data, gpus : int
        Stages of the pipeline, replicas, and GPUs, as printed.
    batch : int
        Sequences of a step, of all replicas.
    tflops, mfu : float
        What was measured on this mesh, as printed: Tflop/s of a GPU, and MFU in percent; 0 where
        nothing was.
    """

    size: str
    model: str
    tensor: tuple[int, ...]
    stages: int
    data: int
    gpus: int
    batch: int
    tflops: float = 0.0
    mfu: float = 0.0

    @property
    def contradictions(self) -> list[str]:
        """Return a line on each mesh that is of another number of GPUs than printed."""
        return [f"{self.size}: TP {tensor} x PP {self.stages} x DP {self.data} is {product} GPUs, "
                f"not {self.gpus}: tested with the replicas that {self.gpus} have"
                for tensor in self.tensor
                if (product := tensor * self.stages * self.data) != self.gpus]


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a file.

    Attributes
    ----------
    title, source : str
        The name of the rules, and where they are from.
    batches : str
        Where the batches are from.
    rules : tuple of Rule
        The rules.
    remarks : tuple of str
        Further remarks.
    """

    title: str
    source: str
    batches: str
    rules: tuple[Rule, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tested:
    """A plan, which may not fit, or why there is none; and what chose it, such as "TP 2, plain".

    It is of a rule, of the decision tree, or of the planner.
    """

    rule: Rule
    by: str
    training: Training
    plan: TrainingPlan | None
    problem: str

    @property
    def lacks(self) -> float:
        """Return the bytes of memory that the plan lacks; 0 if it fits."""
        return max(0.0, self.plan.memory["all"] - self.training.machine.memory_bytes)


def load_rules(name: str) -> Rules:
    """Read rules: supplied ones, or a TOML file; UsageError when it is missing, or has none."""
    found = read_described("rule", name, Rules, lambda tree: msgspec.convert(tree, Rules))
    for rule in found.rules:
        counts = {"stages": rule.stages, "data": rule.data, "gpus": rule.gpus,
                  "batch": rule.batch, "tensor": min(rule.tensor, default=0)}
        for field, value in counts.items():
            if value < 1:
                raise UsageError(f"rule file {name}: {rule.size}: {field} = {value}: a whole "
                                 f"number of at least 1 would do")
    return found


def fitting_tensor(gpt: ModelFile, dtype: str, machine: Machine) -> int:
    """Return the tensor parallelism of the decision tree.

    It is 1, for replicas alone, where the state of a training fits one GPU.  Else the tree takes
    the lesser of a node's GPUs and of the state over a GPU's memory, here up to the next divisor.
    """
    state = sum(state_by_kind(dtype, gpt.parameters, zero=0, shards=1).values())
    needed = math.ceil(state / machine.memory_bytes)
    return next((ranks for ranks in range(1, machine.ranks_per_node)
                 if machine.ranks_per_node % ranks == 0 and ranks >= needed),
                machine.ranks_per_node)


def check_rules(rules: Rules, machine: Machine, dtype: str,
                progress: Callable[[str], None] = lambda line: None) -> Iterator[list[Tested]]:
    """Test rules on a machine; yield the plans of each, the planner's own as the last."""
    models = [load_model(rule.model) for rule in rules.rules]    # all, before the first search
    for rule, gpt in zip(rules.rules, models):
        whole = Search(Training(gpt, rule.gpus, rule.batch, gpt.seq, dtype, machine))
        found = []

        def test(by: str, find: Callable[[Search], TrainingPlan], **meshes: Any) -> None:
            search = whole.within(lambda line: progress(f"{rule.size}, {by}: {line}"), **meshes)
            try:
                plan, problem = find(search), ""
            except UsageError as error:
                plan, problem = None, str(error)
            found.append(Tested(rule, by, search.training, plan, problem))
        for tensor in rule.tensor:
            of_rule = {"keeps": partial(_is_megatron, tensor), "stages": rule.stages}
            test(f"TP {tensor}, plain", _plain_plan, **of_rule)
            test(f"TP {tensor}", _best_plan, **of_rule)
        tensor = fitting_tensor(gpt, dtype, machine)
        test(f"tree, TP {tensor}", _best_plan, keeps=partial(_is_megatron, tensor),
             stages=int(tensor == 1))
        test("planner", _best_plan)
        yield found


def _is_megatron(tensor: int, scheme: str, grid: GridShape) -> bool:
    return KIND_TITLES[scheme] == "1-D" and grid.ranks == tensor


def _best_plan(search: Search) -> TrainingPlan:
    return search.run(compares=False).best


def _plain_plan(search: Search) -> TrainingPlan:
    """Return the plan with what a rule leaves open as in `SIMPLE`; UsageError if there is none."""
    training = search.training
    for scheme, grid in training.shapes:
        for data, stages in training.meshes(grid.ranks):
            plan = search.predicted(Choice(data=data, stages=stages, scheme=scheme, grid=grid,
                                           **SIMPLE))
            if plan is not None:
                return plan
    raise UsageError(f"{training.gpt.name} on {training.gpus} GPUs: no such mesh divides the "
                     f"batch of {training.batch}, the heads and the layers")
