"""Plans of whole trainings against brute force, and the lines that say why there is none."""
import argparse
import re
import shlex
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

from bench.__main__ import main
from bench.command_line import config_options
from bench.errors import UsageError
from bench.instruments.placement import mesh_order
from bench.prediction.pipelines import hop_seconds
from bench.prediction.closed_form_plan import collective_price
from bench.prediction.machine_model import load_machine
from bench.prediction.model_file import SIZES, ModelFile, load_model
from bench.prediction.training_plans import screening, search
from bench.prediction.training_plans.choices import Choice, Training, list_grids
from bench.prediction.training_plans.dimensions import DIMENSIONS, FIRST
from bench.prediction.training_plans.layer_work import (PlannedLayer, screen_layer, screened_bytes,
                                                        screened_work, trace_layer, traced_work)
from bench.prediction.pipelines.training_step import layer_parameters
from bench.reports.plans.training_plans import command_lines, remarks
from bench.verbs import train
from jobs.own_options import list_verb_problems
from mm3d.config import Config, Division
from mm3d.grid.shape import GridShape
from mm3d.model.architecture import Architecture
from mm3d.model.experts.layer import Experts
from mm3d.tracing import dry_run
from mm3d.training.gpt import GPT
from plans import Few, check_best, training, works_of

SMALL = ModelFile("small", layers=4, hidden=256, heads=4, vocab=512, seq=128)
LLAMA = Architecture(norm="rms", positions="rotary", kv_heads=2, perceptron="swiglu", inner=320,
                     biases="none")
PLAN = ["plan", "--machine", "dgx-a100"]


def few(asked: Training) -> Few:
    """A search among a part of all plans; of the smallest batch with fewer grids."""
    return Few(asked, lambda one: one.recompute in ("none", "full") and one.places in (1, 4)
               and one.scheme in ("1d", "2d", "3d") and one.micro in (1, asked.batch // one.data)
               and (asked.batch > 2 or [*one.grid.sizes] == sorted(one.grid.sizes)),
               lambda one: one.zero < 3)


@pytest.mark.slow
@pytest.mark.parametrize("gpus, batch, mib, experts", [
    (4, 2, 20, None), (3, 3, 24, None),
    (2, 4, 93, Experts(4, top=2, every=1, gate="mixtral", capacity=None))])
def test_each_family_has_the_best_of_all_its_plans_predicted_exactly(gpus, batch, mib, experts):
    """Nothing is left out: every grid, schedule, policy, stage of ZeRO, shard and place."""
    asked = search.Search(training(
        msgspec.structs.replace(SMALL, experts=experts), gpus, batch, mib))
    every, fitting = check_best(asked)
    assert 4 < len(fitting) < len(every) == len([*asked.choices()])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("gpus, batch, mib", [
    (8, 2, 13), (8, 4, 20), (16, 4, 9), (16, 4, 14)])
def test_the_best_plan_is_that_of_all_predicted_exactly(gpus, batch, mib):
    asked = few(training(SMALL, gpus, batch, mib))
    _, fitting = check_best(asked)
    assert len(fitting) > 10
    for plan in fitting:
        filled, _ = asked.layers.filled(PlannedLayer.of(plan.choice, whole=True))
        assert asked.estimator.memory(plan.choice, filled) <= screening.SLACK * asked.limit
        assert asked.may_fit(plan.choice)


@pytest.mark.parametrize("kernels", ["numpy", "own", "fused"])
def test_no_bound_is_above_the_seconds_of_a_plan(kernels):
    machine = msgspec.structs.replace(load_machine("cpu"), kernels=kernels)
    asked = search.Search(Training(SMALL, 8, 8, SMALL.seq, "float32", machine))
    choices = [*asked.choices()]
    for at in np.random.default_rng(1).choice(len(choices), 10, replace=False):
        choice, exact = choices[at], asked.predicted(choices[at]).seconds
        passes = asked.layers.filled(PlannedLayer.of(choice, whole=True))[1]
        assert asked.estimator.least(choice, passes) <= exact, choice
        for work, unsure in ((asked.screened, screening.UNSURE_SCREENED),
                             (asked.traced, screening.UNSURE_TRACED)):
            bound = asked.estimator.bound(choice, work(PlannedLayer.of(choice)), unsure)
            assert bound <= exact, (choice, unsure)


def test_a_doubt_saves_numbers_that_differ_by_less():
    bounded = [(bound, bound) for bound in (10, 10.05, 10.2, 99)]

    def first(doubt: float) -> tuple[float, int]:
        refined = []
        found = next(screening.refined(bounded, lambda bound: refined.append(bound) or [
            (bound + .15 * (bound == 10), bound)], doubt))
        return found[1], len(refined)
    assert [first(doubt) for doubt in (0, .001, .01, .02)] == [
        (10.05, 2), (10.05, 2), (10, 1), (10, 1)]


def test_a_family_of_3d_divides_several_directions():
    """1 x P x 1 is 1d-sp, and the others of one direction are a family of their own."""
    for places in (2, 4, 6):
        plans = [FIRST._replace(scheme=scheme, grid=grid) for scheme, grid in list_grids(places)]
        found = {plan.grid.sizes: plan.family for plan in plans if plan.scheme == "3d"}
        assert (1, places, 1) not in found and ("1d-sp", "1-D") in {
            (plan.scheme, plan.family) for plan in plans}
        assert all(found[sizes] == "one direction" for sizes in ((places, 1, 1), (1, 1, places)))
        assert {family for sizes, family in found.items() if places not in sizes} <= {"3-D"}
    assert DIMENSIONS["grid"].said(plans[-1]) == "3d 6x1x1 (one direction)"
    assert DIMENSIONS["grid"].said(plans[0]) == "1d 6"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_by_dry_runs_of_layers_is_near_that_of_a_step_where_w_is_apart(recompute):
    asked = search.Search(training(SMALL, 16, 4, 100))
    plan = asked.predicted(Choice(2, 1, 2, "zb-h1", 1, "3d", GridShape("xyz", (1, 1, 4)),
                                  recompute))
    filled = asked.traced(PlannedLayer.of(plan.choice)).filled
    assert asked.estimator.memory(plan.choice, filled) == pytest.approx(
        plan.memory["all"], rel=.02)


UNEVEN = msgspec.structs.replace(SMALL, name="uneven", hidden=180, heads=6, vocab=509)


@pytest.mark.slow
@pytest.mark.parametrize("gpt, batch, mib, likes, zeros", [
    # Grids that divide 6 heads, 180 features or 3 sequences among 2 and 4 ranks.
    (UNEVEN, 6, 12, lambda one: one.places in (2, 4) and one.stages < 4, (0, 2)),
    # Shards of 8, 4 and 2 replicas, in every place on the nodes.
    (SMALL, 8, 26, lambda one: one.places < 3 and one.micro == 1 and one.scheme == "1d",
     (0, 1, 2, 3))])
def test_so_it_is_with_uneven_grids_shards_and_places(gpt, batch, mib, likes, zeros):
    _, fitting = check_best(Few(
        training(gpt, 8, batch, mib), lambda one: one.recompute == "none"
        and one.schedule == "1f1b" and likes(one), lambda one: one.zero in zeros))
    assert len(fitting) > 10


@pytest.mark.parametrize("sizes", [(3,), (6,), (1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_closed_forms_price_the_largest_rank(sizes):
    asked = Training(load_model("llama-2-7b"), 6, 6, 2048, "float32", load_machine("dgx-a100"))
    scheme, grid = next(one for one in asked.shapes if one[1].sizes == sizes)
    layer = PlannedLayer(scheme, grid, 6, "none", False)
    traces = trace_layer(asked, layer)
    near, exact = works_of(asked, layer, .03, traces)
    assert near.filled.saved == pytest.approx(exact.filled.saved, rel=.03)
    assert layer_parameters(scheme, grid, asked.stack(6, "none").sizes) == pytest.approx(
        traces[0].parameters / 8, rel=1e-3)


@pytest.mark.parametrize("inside", ["", "r", "d", "s", "x", "y"])
def test_ranks_of_a_hop_are_numbered_in_their_order_on_the_nodes(inside):
    mesh = GridShape("rdsxy", (2, 3, 4, 2, 2))
    order = mesh_order(mesh, inside)
    placed = GridShape(order, [mesh[name] for name in order])
    every = np.arange(4), np.arange(4), np.full(4, 10)
    senders, receivers, moved = hop_seconds.place_moves(every, 2, mesh, inside, 64, (1, 2))
    for stage, found in ((1, senders), (2, receivers)):
        assert [*found] == [placed.rank(one) for one in mesh.all_coordinates()
                            if one["s"] == stage]
    assert {*moved} == {20} and len(moved) == 24


def test_what_lies_inside_nodes_is_faster_there():
    """With the replicas inside nodes of 4, their sums are faster, and hops leave the node."""
    asked = training(SMALL, 8, 8, 100)
    node = msgspec.structs.replace(asked.machine.node, seconds_per_message=1e-6)
    asked = replace(asked, machine=msgspec.structs.replace(asked.machine, node=node))
    near = Choice(4, 1, 2, "1f1b", 1, "1d", GridShape("x", (1,)), "none", inside="d")
    steps = [search.Search(asked).predicted(near._replace(inside=inside)).step
             for inside in ("", "s", "d")]
    assert steps[0] == steps[1]    # stages are inside already
    assert steps[0].shares == steps[1].shares
    first, last = steps[0], steps[2]
    assert max(last.pipeline.sums) < max(first.pipeline.sums)
    assert np.isnan(first.pipeline.between) and np.isnan(last.pipeline.inside)


def test_hidden_sums_take_no_longer_than_the_longer_of_both():
    asked, one = training(SMALL, 8, 8, 100), Choice(
        4, 1, 2, "1f1b", 1, "1d", GridShape("x", (1,)), "none")
    for zero in range(4):
        plans = [search.Search(replace(asked, overlap=overlap)).predicted(
            one._replace(zero=zero)) for overlap in (False, True)]
        slow, fast = (plan.step for plan in plans)
        saved = slow.seconds - fast.seconds
        assert 0 < saved <= slow.shares["replicas"]
        assert fast.shares["replicas"] < slow.shares["replicas"]
        assert fast.shares["products"] == slow.shares["products"]


def test_plans_that_the_library_refuses_are_counted():
    class Refusing(Training):
        """A training of which the library can run no plan of `refused` stages."""

        refused = 2

        def model(self, choice):
            if choice.stages == self.refused:
                raise ValueError("no such pipeline")
            return super().model(choice)

    asked = Refusing(**vars(training(SMALL, 2, 2, 100)))
    found = few(asked).run()
    assert found.refused and {*found.refused.values()} == {"no such pipeline"}
    (said,) = [line for line in remarks(asked, found).items if "refused" in line]
    assert said.startswith(f"the library refused {len(found.refused)} plans")
    assert next(iter(found.refused)) in said and said.endswith(": no such pipeline")
    Refusing.refused = 1
    one = msgspec.structs.replace(SMALL, layers=1)    # no stages
    with pytest.raises(UsageError, match="can run none of .* no such pipeline"):
        few(replace(asked, gpt=one)).run()


@pytest.mark.parametrize("mib, needed, predicted", [(18, ".0181", False), (18.5, ".0185", True)])
def test_plans_that_fit_by_estimate_alone_are_none(mib, needed, predicted):
    """By closed forms they almost fit, and no longer by a dry run of a layer, or of a step."""
    asked = Few(training(SMALL, 4, 2, mib),
                lambda one: one.recompute == "full" and one.places == 1, lambda one: not one.zero)
    with pytest.raises(UsageError, match=f"no plan fits {mib / 1024:.3g} GiB a GPU; by estimate "
                                         f"the smallest needs 0{needed} GiB"):
        asked.run()
    assert bool(asked.unfit) is predicted
    assert asked.counts["too large"] < asked.counts["candidates"]
    nearest = asked.nearest(3)
    needed = [plan.memory["all"] for plan in nearest]
    assert asked.limit < min(needed) and needed == sorted(needed)
    assert {"data", "data, ZeRO 3", "pipeline"} >= {plan.choice.family for plan in nearest}


def test_all_names_the_nearest_plans_where_none_fits(capsys):
    words = [*PLAN, "--gpus", "2", "--model", "gpt-3-175b", "--batch", "2", "--top", "4"]
    assert main([*words, "--all"]) == 2
    said = capsys.readouterr()
    rows = said.out.partition("Predicted plans that do not fit")[2].splitlines()[-4:]
    lacking = [float(row.split()[-1]) for row in rows]
    assert lacking == sorted(lacking) and lacking[0] > 100
    assert main(words) == 2
    alone = capsys.readouterr()
    assert not alone.out and alone.err == said.err


@pytest.mark.parametrize("model, recompute", [
    ("megatron-1t", "full"), ("llama-2-7b", "none"), ("llama-3-8b", "full")])
def test_closed_forms_of_a_layer_are_near_its_dry_run(model, recompute):
    """With softmax in memory, with scores in registers, and with this library's own passes; of a
    GPT, of SwiGLU with RMSNorm and rotary positions, and with 4 heads of queries for each key."""
    machines = [(load_machine(name), error) for name, error in (
        ("dgx-a100", .03), ("dgx-h100", .03), ("longhorn", .06))]
    assert len({machine.elementwise_block for machine, _ in machines}) == 1    # all that is traced
    asked = Training(load_model(model), 8, 8, 2048, "float32", machines[0][0])
    for scheme, grid in asked.shapes:
        if grid.sizes in ((1,), (4,), (2, 2), (1, 2, 2)):
            layer = PlannedLayer(scheme, grid, 2, recompute, False)
            traces = trace_layer(asked, layer)
            for machine, error in machines:
                near, exact = works_of(replace(asked, machine=machine), layer, error, traces)
                assert near.filled.saved == pytest.approx(exact.filled.saved, rel=.03)


def test_closed_forms_of_a_gpts_ends_are_near_the_dry_run_of_this_librarys_kernels():
    machine = msgspec.structs.replace(load_machine("dgx-a100"), kernels="own")
    asked, price = (Training(load_model("llama-3-8b"), 8, 8, 8192, "bfloat16", machine),
                    collective_price(machine))
    tied = replace(asked, gpt=msgspec.structs.replace(asked.gpt, tied=True))
    for asked, scheme, sizes, micro in ((asked, "1d", {"x": 1}, 1), (asked, "1d", {"x": 1}, 8),
                                        (asked, "3d", {"x": 1, "y": 2, "z": 2}, 1),
                                        (tied, "2d", {"x": 2, "y": 2}, 8)):
        layer = PlannedLayer(scheme, GridShape.from_sizes(sizes), micro, "none", False)
        near = screened_work(layer, screen_layer(asked, layer), price)
        exact = traced_work(asked, layer, trace_layer(asked, layer))
        assert near.ends == pytest.approx(exact.ends, rel=.06)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme, sizes", [("1d-sp", {"x": 2}), ("3d", {"x": 2, "y": 1, "z": 1})])
def test_no_plan_is_left_out_for_logits_that_are_held_once(dtype, scheme, sizes):
    asked = Training(load_model("qwen2-1.5b"), 8, 8, 32768, dtype, load_machine("dgx-h100"))
    layer = PlannedLayer(scheme, GridShape.from_sizes(sizes), 2, "full", False)
    near, exact = screened_bytes(asked, layer)[0], traced_work(
        asked, layer, trace_layer(asked, layer)).filled
    assert near.ends_working < screening.SLACK * exact.ends_working


def written(model: ModelFile, folder) -> str:
    tree = {name: getattr(model, name) for name in ("name", *SIZES, "tied")}
    tree["architecture"] = {name: [*value] if isinstance(value, tuple) else value
                            for name, value in model.architecture.given().items()}
    (folder / "model.toml").write_text(msgspec.toml.encode(tree).decode())
    return str(folder / "model.toml")


def test_dry_predicts_the_best_plan_as_it_is_printed(capsys, tmp_path):
    path = written(SMALL, tmp_path)
    assert main([*PLAN, "--gpus", "2", "--model", path, "--batch", "2", "--all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    options = re.search(r"python -m bench (dry .*?) - mpirun", said)[1].split()
    assert main(options) == 0
    assert "MFU" in said and f"small: {SMALL.parameters / 1e9:.4g} billion parameters" in said
    assert "library refused" not in said
    left_out = re.search(r"not searched: schedules (.*); recompute (.*); schemes (.*?);", said)
    assert [{*names.split(", ")} for names in left_out.groups()] == [
        {"auto", "dualpipe-v", "gpipe", "v-half", "v-min", "zb-h2", "zb-v"},
        {"uniform:N", "full+selective", "uniform:N+selective"}, {"2d-pipelined", "faces"}]


def division_of(words: list[str]) -> tuple:
    """The plan and the division that `train` reads from options."""
    parser = argparse.ArgumentParser()
    train.add_options(parser)
    arguments = parser.parse_args(words)
    return train.make_plan(arguments), config_options.read(Division, arguments)


@pytest.mark.parametrize("choice, overlap", [
    (Choice(2, 1, 2, "interleaved:2", 1, "3d", GridShape("xyz", (1, 2, 1)), "full"), False),
    (Choice(4, 2, 2, "1f1b", 1, "1d", GridShape("x", (1,)), "none", 2, "s"), True)])
def test_dry_train_and_jobs_take_a_plan(choice, overlap, tmp_path, capsys):
    """Seconds and bytes of `dry` are the plan's, and `train` is on its mesh: it moves as much."""
    asked = training(SMALL, 8, 8, 100)
    (tmp_path / "my own.toml").write_text(msgspec.toml.encode(asked.machine).decode())
    gpt = msgspec.structs.replace(SMALL, vocab=256, tied=overlap,
                                  architecture=LLAMA if overlap else SMALL.architecture)
    asked = replace(asked, named=str(tmp_path / "my own.toml"), overlap=overlap, gpt=gpt,
                    asked=f"--model {written(gpt, tmp_path)}")
    plan = search.Search(asked).predicted(choice)
    dry, trained, job = map(shlex.split, command_lines(asked, plan))
    assert main(dry[3:]) == 0
    said = capsys.readouterr().out
    assert f"{plan.seconds:.6g}" in said and f"{plan.memory['all']:,}" in said
    _, settings = words = division_of(trained[7:])
    assert not [*list_verb_problems("train", job[job.index("--") + 1:])]
    assert job[job.index("--") + 1:] == trained[7:]

    def step(model, _):
        model.rehearse()
        model.refresh()
    moved = dry_run.trace(lambda comm, backend: GPT(Config(words[0], settings).on(backend), comm),
                          8, step=step).total_traffic()
    assert {key: one.words for key, one in moved.items()} == {
        key: one.words for key, one in plan.model.whole_step(0, 0).total_traffic().items()}
    assert plan.model.mesh.ranks == 8 and settings.shards == choice.shards


def test_a_dtype_that_the_library_has_not_is_refused_in_a_line(monkeypatch, capsys):
    """With experts that no other test has, so that nothing of them is known."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)    # as where it is not installed
    assert main([*PLAN, "--gpus", "2", "--model", "gpt2", "--batch", "2", "--experts", "3",
                 "--expert-top", "3", "--dtype", "bfloat16"]) == 2
    said = capsys.readouterr().err
    assert "pip install ml_dtypes for bfloat16" in said and said.count("\n") == 1


def test_train_has_no_direction_that_its_mesh_has_not():
    with pytest.raises(UsageError, match="--inside y: the mesh has the directions r, d, s, x"):
        train.place_ranks(MPI.COMM_SELF, Division(scheme="1d"), "y")
