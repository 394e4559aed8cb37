"""Which kernels OpenBLAS is told to use, from made-up descriptions of processors."""
import sys

import pytest

from mm3d import blas_kernels

ZEN4 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
flags\t\t: fpu avx2 avx512f avx512dq

processor\t: 1
"""


@pytest.mark.parametrize("was, now, kernels", [
    ("", "", "Haswell"),
    (" avx512f avx512dq\n\n", "\n\nflags\t\t: avx512f\n", None),    # Zen 3
    ("family\t: 25", "family\t: 26", None),                          # Zen 5
    ("AuthenticAMD", "GenuineIntel", None)])
def test_kernels_of_256_bits_are_the_fastest_on_zen_4_alone(tmp_path, was, now, kernels):
    """The first processor speaks for all."""
    file = tmp_path / "cpuinfo"
    file.write_text(ZEN4.replace(was, now))
    assert blas_kernels.fastest_kernels(file) == kernels
    assert blas_kernels.fastest_kernels(tmp_path / "none") is None


def test_they_are_chosen_before_numpy_starts_unless_the_user_has(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(ZEN4)
    late, chosen, user = {}, {}, {"OPENBLAS_CORETYPE": "SkylakeX"}
    monkeypatch.setitem(sys.modules, "numpy", object())    # which has started OpenBLAS
    blas_kernels.set_default(late, file)
    monkeypatch.delitem(sys.modules, "numpy")
    blas_kernels.set_default(chosen, file)
    blas_kernels.set_default(user, file)
    assert late == {} and chosen == {"OPENBLAS_CORETYPE": "Haswell"}
    assert user == {"OPENBLAS_CORETYPE": "SkylakeX"}
