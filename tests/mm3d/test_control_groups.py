"""The quota of control groups, from made-up files and from a real group."""
import os
import sys
from pathlib import Path

import pytest

from mm3d import control_groups
from support import run_command


@pytest.mark.parametrize("groups, files, quota", [
    ("0::/", {}, None),
    ("0::/", {"cpu.max": "50000 100000"}, 0.5),
    ("0::/job", {"job/cpu.max": "max 100000"}, None),
    ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "400000 100000"}, 1.5),
    ("0::/job/step", {"job/cpu.max": "max 100000", "job/step/cpu.max": "25000 50000"}, 0.5),
    ("0::/elsewhere", {"cpu.max": "300000 100000"}, 3.0),    # as a container sees its own
    ("4:memory:/a\n0::/job", {"unified/job/cpu.max": "10000 20000"}, 0.5),
    ("3:cpu,cpuacct:/job", {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
                            "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 2.5),
    ("3:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000",
                    "cpu/cpu.cfs_quota_us": "80000", "cpu/cpu.cfs_period_us": "100000"}, 0.8),
    ("3:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": "50000",
                       "cpu/job/cpu.cfs_period_us": "100000"}, None),
    ("0::/", {"cpu.max": "what"}, None),
    (None, {"cpu.max": "50000 100000"}, None),
])
def test_the_least_quota_of_the_groups(tmp_path, groups, files, quota):
    if groups is not None:
        (tmp_path / "self").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert control_groups.cpu_quota(tmp_path / "self", tmp_path / "groups") == quota


PROGRAM = """
import os
from mm3d import launcher
from bench.instruments import host
found = host.describe_host("numpy", 1, "MPI", "")
print(launcher.cores(), found["cores"], found["cpu_quota"], found["allowed_cores"],
      len(os.sched_getaffinity(0)), found["blas_threads"])
"""


def test_a_real_quota_is_obeyed_and_recorded():
    group = Path(f"/sys/fs/cgroup/cpu/mm3d-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
        (group / "cpu.cfs_period_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        done = run_command(["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh",
                            sys.executable, "-c", PROGRAM])
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    *cores, quota, allowed, affinity, threads = map(float, done.stdout.split())
    assert cores == [1, 1] and quota == 0.5 and allowed == affinity and threads == 1
