"""An interpreter in the place of one that has PyTorch: its library and its subject are made up.

It runs ``bench/experiments/torch/serve.py`` as the real one does.
"""
import stat
import sys
from pathlib import Path

from support import ROOT

PROGRAM = '''#!{python}
import contextlib, os, sys, types
import numpy as np

if sys.argv[1] == "-c":    # whether it can import torch
    sys.exit()
HERE, THREADS = os.path.dirname(os.path.abspath(__file__)), [1]
sys.path[:0] = [os.path.dirname(sys.argv[1]), {root!r}]
import serve

torch, group = types.ModuleType("torch"), types.ModuleType("torch.distributed")
torch.__version__, torch.__config__ = "made up", types.SimpleNamespace(show=lambda: "")
torch.backends = types.SimpleNamespace(mkl=types.SimpleNamespace(is_available=lambda: False))
torch.set_num_threads = lambda count: THREADS.__setitem__(0, count)
torch.get_num_threads = lambda: THREADS[0]
torch.set_default_dtype = lambda dtype: None
torch.float32, torch.float64 = np.float32, np.float64
torch.no_grad, torch.ones = contextlib.nullcontext, lambda *shape, dtype: np.ones(shape, dtype)
torch.mm = np.matmul
torch.distributed = group
group.init_process_group = lambda *given, **more: None
group.destroy_process_group = lambda: None
sys.modules.update({{"torch": torch, "torch.distributed": group}})

{subject}

serve.resolve_name = lambda name: Subject
serve.main(*sys.argv[2:])
'''


def make_up(folder: Path, subject: str, name: str = "python") -> str:
    """Write an interpreter whose subject is the class `Subject` of this source; return its path.

    The source finds files beside the interpreter in the folder HERE.
    """
    path = folder / name
    path.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT), subject=subject))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
