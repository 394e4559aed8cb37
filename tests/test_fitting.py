"""Rows of the tables and the memory of a cluster's ranks."""
import msgspec

from bench.cases import case, load as tables, select
from jobs import fitting, scripts
from jobs.site import load


def site(**node):
    """The site gpu4 with another node."""
    found = load("gpu4")
    return msgspec.structs.replace(found, node=msgspec.structs.replace(found.node, **node))


def weak(scheme="3d"):
    """The tiny weak row on 8 ranks."""
    return case(next(row for row in select("weak", scheme) if row.gpus == 8), "tiny")


def test_a_row_gets_the_policy_that_fits_or_is_refused(tmp_path):
    one = weak()
    assert fitting.fitting(site(gpu_memory=None), one) == fitting.Fitting("none")
    found = fitting.fitting(site(gpu_memory="16 GB"), one)
    assert found.recompute == "none" and found.fits
    tight = fitting.fitting(site(gpu_memory=f"{found.peak - 1} B"), one)
    assert tight.fits and tight.recompute != "none" and tight.peak < found.peak
    refused = fitting.fitting(site(gpu_memory="1 KB"), one)
    assert not refused.fits and "with any policy" in refused.refusal(1000)
    work = scripts.Work(site(gpu_memory=f"{found.peak - 1} B"), "gpu4", tmp_path)
    script = scripts.row_script(work, one)
    assert f"--recompute={tight.recompute}" in script
    assert "-m bench dry" in script and f"--memory={found.peak - 1} B" in script
    assert "bench dry" not in scripts.row_script(
        scripts.Work(site(gpu_memory=None), "gpu4", tmp_path), one)


def test_ranks_share_the_memory_of_their_gpu_or_node():
    assert fitting.limit(site(gpu_memory="16 GB", ranks=8), 64) == 8 * 10 ** 9
    assert fitting.limit(site(gpu_memory=None, memory="64 GB", gpus=0), 64) == 16 * 10 ** 9
    assert fitting.limit(site(gpu_memory=None), 64) is None


def test_the_largest_row_fits_the_paper_s_gpus():
    """Weak 1-D on 64 needs most beyond what full recomputation saves; gpu4 says how it fits."""
    one = case(next(row for row in select("weak", "1d") if row.gpus == 64), "paper")
    found = fitting.fitting(load("gpu4"), one)
    assert found.fits and found.recompute == "uniform:2+selective"
    assert 13.6 < found.peak / 2 ** 30 < 15


def test_every_published_row_fits_the_paper_s_gpus():
    """By the closed forms, on any machine and at once."""
    for row in tables().rows:
        assert fitting.fitting(load("gpu4"), case(row, "paper")).fits, row
