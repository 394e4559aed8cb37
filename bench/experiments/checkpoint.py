"""Measure how fast checkpoints are written and read, beside the disk itself."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, Callable

import numpy as np
from mpi4py import MPI

import mm3d
from bench.agreement import agree, make_on_rank_0
from bench.errors import UsageError, WrongResult, as_usage_error
from bench.instruments.sampling import measured_environment, take_samples_in_turns
from bench.instruments.timing import Limits
from bench.records.model_run import make_record
from bench.records.measurements import Check, Measurements
from mm3d.checkpoints.block_files import stored_arrays
from mm3d.model.draws import draw_normal

OPERATIONS = ("save", "restore", "disk write", "disk read")
CHUNK = 1 << 23    # bytes of one write or read of the disk itself
QUANTITY = "elements of parameters and moments that differ after save and restore"


def measure_checkpoint(comm: MPI.Intracomm, folder: Path, sizes: mm3d.ModelSizes, dtype: str,
                       limits: Limits, seed: int = 0,
                       backend: str | None = None) -> Measurements:
    """Measure `mm3d.save` and `mm3d.restore` of a Transformer with the moments of AdamW.

    Weights are divided among all ranks by the scheme "1d".  What was saved is restored and
    compared first.  Beside it each rank writes as many bytes as it holds to one plain file, waits
    until they are on the disk, and reads them.  Before each read the files are dropped from the
    system's cache, where the system does so.  All four take turns, in random order.

    In `folder` a new one is made for the files, and removed at the end, or by the next measurement
    there if this one is killed.  `dtype` is that of parameters and moments.

    Raises UsageError for sizes and types that a model cannot have, and a folder that cannot be
    written; WrongResult when what was restored differs.
    """
    with as_usage_error():
        scheme = mm3d.scheme("1d", comm, grid=(comm.size,), backend=backend)
        model = mm3d.Transformer(scheme, **sizes, seed=seed, dtype=dtype)
        optimizer = mm3d.AdamW(model, 1e-3)
    lock = make_on_rank_0(lambda: _make_work_folder(folder), comm)
    work = comm.bcast(lock and Path(lock.name).parent)
    subject = SavedModel(comm, work, model, optimizer, seed)
    try:
        differing = subject.verify()
        if differing:
            raise WrongResult(f"{differing} {QUANTITY}")
        samples, ended_by = subject.sample(limits)
    except OSError as error:
        raise UsageError(f"--disk {folder}: {error}") from error
    finally:
        # No barrier: ends that all ranks reach follow a collective, and where one rank fails alone
        # the others never come.
        if lock:
            lock.close()
            shutil.rmtree(work, ignore_errors=True)
    return make_record(
        "checkpoint", {**model.sizes, "dtype": model.dtype, "scheme": "1d", "ranks": comm.size,
                       "seed": seed, "ended_by": ended_by, **asdict(limits)},
        measured_environment(model.grid.backend.name, comm),
        {"s": {"samples": samples}, "byte": {"bytes": subject.total}},
        [Check(QUANTITY, float(differing), 0.0)])


def _make_work_folder(folder: Path) -> IO:
    """Make a folder with a name of its own; return its lock. UsageError if it cannot be made.

    Folders whose locks nobody holds were left by killed runs, and are removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("checkpoint-files-*/lock"):
            with suppress(OSError), open(path, "r+b") as left:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent)
        lock = open(Path(tempfile.mkdtemp(prefix="checkpoint-files-", dir=folder), "lock"), "xb")
        with suppress(OSError):    # a file system may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError as error:
        raise UsageError(f"--disk {folder}: {error}") from error


class SavedModel:
    """A model to save, and a plain file per rank of as many bytes, in a work folder."""

    def __init__(self, comm: MPI.Intracomm, folder: Path, model: Any, optimizer: Any,
                 seed: int) -> None:
        self.seed = seed
        self.comm, self.folder, self.model, self.optimizer = comm, folder, model, optimizer
        self.checkpoints, self.plain = folder / "saved", folder / f"plain-{comm.rank}"
        counted = [n for n, t in enumerate(model.trained) if t.counted]
        self.own = sum(a.nbytes for a in self._arrays(counted))
        self.total, self.step = comm.allreduce(self.own), 0
        # Zeros would be written faster where the file system compresses.
        self.random = np.random.default_rng((seed, comm.rank)).bytes(min(CHUNK, self.own))

    def _arrays(self, numbers: Any = None) -> list:
        """Return the arrays of parameters and moments, all or those of the given numbers."""
        trained = [t.master for t in self.model.trained]
        every = [trained, *self.optimizer.state.values()]
        return [arrays[n] for arrays in every
                for n in (range(len(trained)) if numbers is None else numbers)]

    def verify(self) -> int:
        """Save, change all, and restore; return the number of elements that differ."""
        to_host = self.model.grid.backend.to_host
        for stored in stored_arrays(self.model, self.optimizer):
            # All elements of all ranks differ, so that none can be taken for another.
            stored.backend.copy_from_host(draw_normal(
                self.seed, stored.path, stored.shape, stored.place).astype(stored.dtype),
                stored.array)
        before = [np.array(to_host(a)) for a in self._arrays()]
        self.save()
        for a in self._arrays():
            a[...] = -1
        self.restore()
        return self.comm.allreduce(sum(int((a != to_host(b)).sum())
                                       for a, b in zip(before, self._arrays())))

    def remove_saved(self) -> None:
        """Remove the checkpoint, on rank 0: `save` would do so within its time."""
        if self.comm.rank == 0:
            for path in self.checkpoints.glob("step-*"):
                shutil.rmtree(path)

    def save(self) -> None:
        """Save a checkpoint."""
        self.step += 1
        mm3d.save(self.checkpoints, self.model, self.optimizer, step=self.step, keep=1)

    def restore(self) -> None:
        """Restore the checkpoint."""
        mm3d.restore(self.checkpoints, self.model, self.optimizer)

    def write_plain(self) -> None:
        """Write this rank's bytes to a plain file, and wait until they are on the disk."""
        chunk = memoryview(self.random)
        with open(self.plain, "wb", buffering=0) as file:
            for start in range(0, self.own, CHUNK):
                file.write(chunk[:min(CHUNK, self.own - start)])
            os.fsync(file.fileno())

    def read_plain(self) -> None:
        """Read the plain file."""
        chunk = memoryview(bytearray(CHUNK))
        with open(self.plain, "rb", buffering=0) as file:
            while file.readinto(chunk):
                pass

    def drop_from_cache(self) -> None:
        """Ask the system to forget the files, of all ranks on this node."""
        for path in [self.plain, *self.checkpoints.glob("step-*/*")]:
            if path.exists() and hasattr(os, "posix_fadvise"):
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def sample(self, limits: Limits) -> tuple[list[list[float]], str]:
        """Take samples of all operations in turns; a sample is the slowest rank's seconds."""
        def time_one(act: Callable[[], None]) -> float:
            self._do(self.remove_saved if act == self.save else self.drop_from_cache)
            return self._do(act)
        self._do(self.write_plain)    # so that it can be read first
        return take_samples_in_turns([partial(time_one, act) for act in (
            self.save, self.restore, self.write_plain, self.read_plain)],    # as in OPERATIONS
            limits, self.seed, self.comm)

    def _do(self, act: Callable[[], None]) -> float:
        """Return the seconds until all ranks have called `act`; OSError on all if one cannot."""
        self.comm.Barrier()
        begun, problem = time.perf_counter(), None
        try:
            act()
        except OSError as error:
            problem = str(error) or repr(error)
        seconds = time.perf_counter() - begun
        agree(problem, self.comm, OSError)
        return self.comm.allreduce(seconds, MPI.MAX)
