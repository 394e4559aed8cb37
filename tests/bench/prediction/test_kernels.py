"""Kernels of a GPU, fused and this library's: what each moves and computes, from a dry run."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from bench.prediction import machine_model
from bench.prediction.layer_blocks import BlockSizes, elementwise_coefficients, gradient_words
from bench.prediction.kernels import attention_of, events_of_call, with_kernels
from bench.prediction.seconds import Flash, trace_terms
from bench.prediction.pipelines.training_step import adamw_seconds, unadded_seconds
from mm3d import ModelSizes
from mm3d.arrays.cupy_kernels import KERNEL_NAMES
from mm3d.grid.shape import GridShape
from mm3d.model.architecture import Architecture
from mm3d.tracing import dry_run
from mm3d.tracing.events import Call, Gemm, MemoryPass, PHASES

SIZES = {"layers": 1, "hidden": 32, "heads": 4, "batch": 2, "seq": 8}
ELEMENTS, SCORES, HEAD = 2 * 8 * 32, 2 * 4 * 8 * 8, 8    # of an activation, of all scores


def traced(kernels="fused", attention="flash", dtype="float16", **options):
    trace = dry_run.trace_step("serial", 1, dtype=dtype, **SIZES, **options)
    return trace, with_kernels(trace, kernels, attention, dtype, HEAD)


def moved(trace) -> dict:
    """Arrays of the size of an activation that passes move, by phase and part."""
    found = {}
    for (phase, part, event), times in trace.events.items():
        if isinstance(event, MemoryPass) and event.operation == "fused":
            found[phase, part] = found.get((phase, part), 0) + times * event.bytes / ELEMENTS / 2
    return found


def test_own_kernels_move_what_their_launches_are_given():
    """By hand, of ``kernels.cu`` and ``row_kernels.cu``: e, h, s and l are the bytes of an
    activation, a vector, the scores in 16 bits, and a number of 32 bits for each score's row."""
    e, h, s, lse, rows = 2 * ELEMENTS, 2 * 32, 2 * SCORES, 4 * 2 * 4 * 8, 4 * 2 * 8
    add = 2 * e + h                                   # a vector to every row, in place
    total = h                                         # the sums of one block of rows
    norm = {"forward": 2 * e + rows + add + h, "backward": 2 * e + 2 * total + add + 3 * e + rows}
    copies = 2 * e                                    # of heads
    expected = {
        ("forward", "attention.qkv"): 3 * add, ("forward", "attention.proj"): add,
        ("forward", "mlp.down"): add, ("forward", "gelu"): 4 * add,
        ("forward", "attention"): 4 * copies + 2 * s + s + lse,
        ("backward", "attention.qkv"): 3 * (e + total),
        ("backward", "attention.proj"): e + total, ("backward", "mlp.down"): e + total,
        ("backward", "gelu"): 4 * (3 * e + h + total),
        ("backward", "attention"): 7 * copies + 2 * s + s + lse + s + 2 * s + s}
    expected |= {(phase, name): norm[phase] for phase in norm for name in ("ln1", "ln2")}
    found: dict = {}
    for (phase, part, event), times in traced("own", "softmax")[1].events.items():
        if isinstance(event, MemoryPass) and event.operation in KERNEL_NAMES:
            found[phase, part] = found.get((phase, part), 0) + times * event.bytes
    assert found == expected


@pytest.mark.parametrize("window", [None, 3])
def test_own_kernels_leave_the_passes_of_numpy_out(window):
    trace, found = traced("own", "softmax", causal=True, architecture=Architecture(window=window))
    left = {event.operation for event in found.count(MemoryPass)}
    assert left - set(KERNEL_NAMES) == {"add"}
    assert {event.operation for event in trace.count(MemoryPass)} > {"add", "exp", "tanh"}
    scores: Counter = Counter()    # by phase and type of the product
    for (phase, part, event), times in found.events.items():
        if isinstance(event, Gemm) and part == "attention":
            scores[phase, event.result] += times
    assert scores == {("forward", "float32"): 1, ("forward", "float16"): 1,
                      ("backward", "float32"): 2, ("backward", "float16"): 3}


def test_own_attention_leaves_out_what_a_mask_hides_from_a_block():
    array, causal = ((64, 512, 1, HEAD), "float32"), True
    found = events_of_call(Call("attention_forward", (array,) * 3 + (0, causal),
                                (("out", array),)))
    products = Counter({(one.m, one.n, one.k): times for one, times in found.items()
                        if isinstance(one, Gemm)})
    assert products == {(256, HEAD, 512): 1, (256, 512, HEAD): 1, (256, HEAD, 256): 1,
                        (256, 256, HEAD): 1}
    assert sum(one.bytes * times for one, times in found.items()
               if isinstance(one, MemoryPass)) == (
        64 * 256 * (2 * (512 + 256) + 2) * 4)    # scores are read and overwritten; with logarithms


@pytest.mark.parametrize("dtype, flash", [("float16", True), ("float32", False)])
def test_own_attention_is_one_kernel_in_16_bits(dtype, flash):
    own = msgspec.structs.replace(machine_model.load_machine("dgx-h100"), kernels="own")
    attention = attention_of(own, dtype)
    assert attention == ("flash" if flash else "softmax")
    _, found = traced("own", attention, dtype)
    here = {event for (phase, part, event) in found.events if part == "attention"
            and phase == "backward" and not isinstance(event, Gemm)}
    if flash:
        assert here == {Flash(5 * 2 * SCORES * HEAD, dtype), MemoryPass("fused", 7 * 2 * ELEMENTS)}
    else:
        assert {event.operation for event in here} == {
            "copy_rows", "softmax_recompute", "softmax_backward"}


@pytest.mark.parametrize("dtype, moved, less", [("float32", 7 * 4, 3 * 4),
                                                ("bfloat16", 7 * 4 + 2, 0)])
def test_adamw_on_a_gpu_is_one_kernel(dtype, moved, less):
    """It reads four numbers, writes three, and in 16 bits values; the first micro-batch moves
    three less than a trace says, which adds to gradients, or in 16 bits rounds into wider ones."""
    machine = machine_model.load_machine("dgx-h200")
    own = msgspec.structs.replace(machine, kernels="own")
    number = 1e6 / machine.memory_bandwidth / machine.achieved.memory
    assert adamw_seconds(own, 1e6, dtype) == pytest.approx(moved * number)
    assert unadded_seconds(own, 1e6, dtype) == pytest.approx(less * number)
    assert unadded_seconds(machine, 1e6, dtype) == 0


def test_one_kernel_reads_and_writes_the_ends_of_its_layer():
    found = moved(traced()[1])
    assert found["forward", "ln1"] == 2 and found["backward", "ln1"] == 3
    assert found["forward", "gelu"] == 8 and found["backward", "gelu"] == 12
    assert found["forward", "attention"] == 4 and found["backward", "attention"] == 7
    assert found["forward", "residual"] == 2 * 3 and found["backward", "residual"] == 2 * 3
    assert ("forward", "mlp.up") not in found and found["backward", "mlp.up"] == 4    # the bias's


@pytest.mark.parametrize("phase, products", [("forward", 2), ("backward", 5)])
def test_flash_computes_scores_again_in_backward(phase, products):
    trace, found = traced()
    flash = [(event, times) for (when, _, event), times in found.events.items()
             if isinstance(event, Flash) and when == phase]
    assert flash == [(Flash(products * 2 * SCORES * HEAD, "float16"), 1)]
    kept = [event for (when, part, event) in found.events
            if isinstance(event, Gemm) and part == "attention"]
    assert not kept


@pytest.mark.parametrize("phase, products, arrays", [("forward", 2, 4), ("backward", 4, 5)])
def test_softmax_moves_scores_and_keeps_them(phase, products, arrays):
    _, found = traced(attention="softmax")
    flops = sum(times * event.flops for (when, part, event), times in found.events.items()
                if isinstance(event, Gemm) and (when, part) == (phase, "attention"))
    assert flops == pytest.approx(products * 2 * SCORES * HEAD)
    assert found.events[phase, "attention", MemoryPass("softmax", arrays * SCORES * 2)] == 1
    assert {event.dtype for (_, part, event) in found.events
            if isinstance(event, Gemm) and part == "attention"} == {"float16"}


def test_work_done_again_is_that_of_forward():
    found = traced(attention="softmax", recompute="full")[1]
    assert found.events["backward", "attention (again)",
                        MemoryPass("softmax", 4 * SCORES * 2)] == 1
    assert moved(found)["backward", "ln1 (again)"] == 2


def test_seconds_of_fused_kernels_are_bytes_and_operations_over_rates():
    machine = msgspec.structs.replace(machine_model.load_machine("dgx-a100"), launch_seconds=0.0)
    _, found = traced()
    spent = trace_terms(machine, found)["forward"]
    arrays = sum(value for (phase, _), value in moved(found).items() if phase == "forward")
    assert spent["memory"] == pytest.approx(arrays * 2 * ELEMENTS / machine.memory_bandwidth)
    without = trace_terms(machine, traced(attention="softmax")[1])["forward"]
    assert without["memory"] - spent["memory"] == pytest.approx(
        4 * SCORES * 2 / machine.memory_bandwidth)


@pytest.mark.parametrize("kernels", ["numpy", "own", "fused"])
@pytest.mark.parametrize("seq, dtype", [(64, "float32"), (4096, "float32"), (4096, "float16")])
def test_closed_forms_count_the_passes_of_any_layer(kernels, seq, dtype):
    """Also of one much longer than those that they are fitted to, and of little but weights; and
    in 16 bits, where NumPy computes in 32."""
    sizes, grid = ModelSizes(1, 1024, 16, 1, seq), GridShape("x", (4,))
    trace = with_kernels(dry_run.trace_step("1d", 4, **sizes, dtype=dtype), kernels, "flash",
                         dtype, 64)
    forms = elementwise_coefficients(kernels, "flash", dtype=dtype)
    added = 3 * gradient_words("1d", grid, sizes, None) * (kernels != "fused")
    for phase, words, more in zip(PHASES, forms, (0, added)):
        moved = sum(times * one.bytes for one, times in trace.count(MemoryPass, phase).items())
        assert np.dtype(dtype).itemsize * (
            words @ BlockSizes("1d", grid, sizes).elements() + more) == pytest.approx(
                moved, rel=.03)
