"""Rows of the tables and the memory of a cluster's ranks."""
from dataclasses import replace

import msgspec
import pytest

import mm3d
from bench.__main__ import main
from bench.cases import combined
from bench.cases.case import make_case, row_stack
from bench.cases.paper import load_tables
from bench.cases.selection import select_rows
from bench.cases.variants import Variant
from bench.prediction import memory_fit
from jobs import fitting, scripts
from jobs.site import load_site
from mm3d.model.recomputation import parse_policy
from mm3d.model.stack import Stack


def site(**node):
    """The site gpu4 with another node."""
    found = load_site("gpu4")
    return msgspec.structs.replace(found, node=msgspec.structs.replace(found.node, **node))


def weak(scheme="3d", ranks=8, preset="tiny", variant=Variant()):
    """The weak row."""
    return make_case(next(row for row in select_rows("weak", scheme) if row.gpus == ranks),
                     preset, variant)


def script_of(tmp_path, one, memory):
    return scripts.row_script(scripts.JobSettings(site(gpu_memory=memory), "gpu4", tmp_path), one)


def test_a_row_gets_the_policy_that_fits_or_is_refused(tmp_path):
    one = weak()
    assert fitting.fit_row(site(gpu_memory=None), one) == fitting.RowFit("none")
    found = fitting.fit_row(site(gpu_memory="16 GB"), one)
    assert found.recompute == "none" and found.fits
    tight = fitting.fit_row(site(gpu_memory=f"{found.peak - 1} B"), one)
    assert tight.fits and tight.recompute != "none" and tight.peak < found.peak
    refused = fitting.fit_row(site(gpu_memory="1 KB"), one)
    assert not refused.fits and "with any policy" in refused.refusal(1000)
    script = script_of(tmp_path, one, f"{found.peak - 1} B")
    assert f"--recompute={tight.recompute}" in script
    assert "-m bench dry" in script and f"--memory={found.peak - 1} B" in script
    assert "bench dry" not in script_of(tmp_path, one, None)


@pytest.mark.parametrize("variant", [Variant(dtype="float64"), Variant(dtype="float16"),
                                     Variant(dtype="bfloat16"), Variant(keep="both"),
                                     Variant(causal=True), Variant("weight", overlap=True)],
                         ids=lambda variant: variant.slug)
def test_a_variant_is_held_against_what_it_needs_itself(tmp_path, variant, capsys):
    """In its own dtype, with what it keeps; the script's dry run and run are of one model."""
    # On 64 ranks: on 8 float32 copies of blocks need as much as float16 saves.
    one, dtype = weak(ranks=64, variant=variant), fitting.numpy_dtype(variant)
    grid = mm3d.SCHEMES["3d"].default_grid(64)
    most = memory_fit.predict_peak("3d", grid, Stack(**one.sizes))
    found = fitting.fit_row(site(gpu_memory=f"{most} B"), one)
    assert fitting.fit_row(site(gpu_memory=f"{most} B"), weak(ranks=64)) == fitting.RowFit(
        "none", most)
    needed, again = (memory_fit.predict_peak("3d", grid, replace(
        row_stack(variant, one.sizes, policy), dtype=dtype), variant)
        for policy in ("none", found.recompute))
    assert variant.causal or (needed > most) == (dtype != "float16")
    if needed <= most:
        assert found == fitting.RowFit("none", needed)
    else:
        assert not found.fits or found.recompute != "none" and found.peak <= most
        assert variant.keep == "none" or not parse_policy(found.recompute).selective
    script = script_of(tmp_path, one, f"{most} B")
    for option in {f"--dtype={variant.dtype}", f"--keep={variant.keep}"} & {*variant.arguments()}:
        assert option in script
    words = fitting.dry_options(one, found.recompute, again)
    assert f"--dtype={dtype}" in words and all(word in script for word in words[:-1])
    assert main(["dry", *words]) == 0 and "it fits" in capsys.readouterr().out
    assert main(["dry", *fitting.dry_options(one, found.recompute, again // 2)]) == 1


def test_ranks_share_the_memory_of_their_gpu_or_node():
    assert fitting.rank_memory(site(gpu_memory="16 GB", ranks=8), 64) == 8 * 10 ** 9
    assert fitting.rank_memory(site(gpu_memory=None, memory="64 GB", gpus=0), 64) == 16 * 10 ** 9
    assert fitting.rank_memory(site(gpu_memory=None), 64) is None


def test_the_largest_row_fits_the_paper_s_gpus():
    """Weak 1-D on 64 needs most beyond what full recomputation saves; gpu4 says how it fits."""
    found = fitting.fit_row(load_site("gpu4"), weak("1d", 64, "paper"))
    assert found.fits and found.recompute == "uniform:2+selective"
    assert 13.6 < found.peak / 2 ** 30 < 15


@pytest.mark.parametrize("gpus", [64, *(pytest.param(n, marks=pytest.mark.slow)
                                        for n in (8, 16, 36))])
def test_every_published_row_fits_the_paper_s_gpus(gpus):
    rows = [row for row in load_tables().rows if row.gpus == gpus]
    assert rows
    for row in rows:
        assert fitting.fit_row(load_site("gpu4"), make_case(row, "paper")).fits, row


def test_a_training_fits_with_its_optimizer_or_not():
    one = combined.list_cases()[0]
    found = fitting.fit_row(site(gpu_memory="16 GB"), one)
    assert found.fits and found.chosen and found.recompute == one.config.division.recompute
    tight = fitting.fit_row(site(gpu_memory=f"{found.peak - 1} B"), one)
    assert not tight.fits and tight.peak == found.peak
