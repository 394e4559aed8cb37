"""The command line of the microbenchmarks ``gemm``, ``collectives`` and ``matmul`` and
``layer``, and of ``doctor``."""

import argparse

from mm3d.recompute import policy

RECOMPUTE = ("what backward computes again instead of finding it kept: none; selective, all but "
             "products with weights; full, each layer from its input; uniform:N, every N layers "
             "from the first one's input; full+selective or uniform:N+selective")
FORMS = ("ab", "abt", "atb")
SCHEMES = ("3d", "2d", "1d")
GPU_PARTS = ("gemm", "elementwise", "layer", "rows")
COUNTS = {3: "three", 4: "four"}


def add_microbenchmarks(verbs) -> None:
    """Add the verbs to the parsers of ``python -m bench``."""
    for add in (_add_gemm, _add_collectives, _add_matmul, _add_scalapack, _add_start, _add_layer,
                _add_gpu):
        add(verbs)


def _add_gemm(verbs) -> None:
    gemm = _verb(verbs, "gemm", "the rate of one rank's matrix products, by size and dtype", 7,
                 1.0)
    gemm.add_argument("--sizes", type=_numbers, default=[2 ** k for k in range(6, 13)],
                      metavar="N,...", help="of square matrices (default 64, 128, ... 4096)")
    gemm.add_argument("--dtypes", type=_names("float32", "float64"), metavar="NAMES",
                      default=["float32", "float64"], help="(default float32,float64)")
    gemm.add_argument("--threads", type=_numbers, metavar="N,...",
                      help="of BLAS (default: 1 and as many as there are cores)")
    _machine_options(gemm, "the rate of products, with the fewest threads")


def _add_collectives(verbs) -> None:
    collectives = _verb(verbs, "collectives", "under mpirun: latency and bandwidth of each "
                        "collective along each direction", 7, 1.0)
    _grid_option(collectives)
    collectives.add_argument("--least", type=int, default=1024, metavar="BYTES",
                             help="the smallest array (default 1024); each is 4 times the last")
    collectives.add_argument("--most", type=int, default=4 * 2 ** 20, metavar="BYTES",
                             help="the largest array (default 4 MiB)")
    _dtype_option(collectives)
    _machine_options(collectives, "the cost of each collective, and of the links")


def _add_matmul(verbs) -> None:
    matmul = _verb(verbs, "matmul", "under mpirun: distributed products beside one process with "
                   "all cores", 7, 30.0)
    _shape_option(matmul)
    _grid_option(matmul)
    matmul.add_argument("--scheme", default="3d", choices=SCHEMES, help="(default 3d)")
    matmul.add_argument("--form", type=_names(*FORMS), default=["ab"], metavar="NAMES",
                        help="of C = AB, AB^T, A^T B: ab, abt, atb, with commas (default ab)")
    _dtype_option(matmul)
    matmul.add_argument("--trace", metavar="FILE", help=(
        "write a traced call of each product for chrome://tracing and ui.perfetto.dev; with "
        "several products each has its name in the file's"))
    matmul.add_argument("--calls", type=whole(1), metavar="N",
                        help="in a sample (default: as many as take one process 100 ms)")
    matmul.add_argument("--backward", action="store_true", help="measure dA and dB too")


def _add_scalapack(verbs) -> None:
    rival = _verb(verbs, "scalapack", "under mpirun: the 3-D product beside ScaLAPACK's, which "
                  "must be installed; prints, and writes no file", 7, 30.0, writes=False)
    _shape_option(rival)
    _grid_option(rival)
    _dtype_option(rival)
    rival.add_argument("--block", type=_numbers, default=[64, 128, 256], metavar="N,...",
                       help="rows and columns of ScaLAPACK's blocks (default 64,128,256)")
    rival.add_argument("--calls", type=whole(1), default=5, metavar="N",
                       help="in a sample (default 5)")


def _add_start(verbs) -> None:
    start = verbs.add_parser("start", help="what many ranks cost: starting, grid, a tiny step")
    start.add_argument("--ranks", type=_numbers, default=[8, 27, 64], metavar="N,...",
                       help="cubes (default 8,27,64)")


def add_doctor(verbs) -> None:
    """Add the verb to the parsers of ``python -m bench``."""
    parser = verbs.add_parser("doctor", help=(
        "what this environment can do; fails when that is not what is wanted"))
    parser.add_argument("--ranks", type=int, default=2, metavar="N",
                        help="that the launcher shall start (default 2)")
    parser.add_argument("--launcher", metavar="COMMAND",
                        help="starts so many ranks of a program, such as 'srun --mpi=pmix -n 8' "
                             "(default: mpirun)")
    parser.add_argument("--ranks-per-node", type=whole(0), default=0, metavar="N",
                        help="fail when a node has more")
    parser.add_argument("--gpus-per-node", type=whole(0), default=0, metavar="N",
                        help="fail when a node has fewer, or ranks share one")
    parser.add_argument("--gpu", action="store_true", help=(
        "also that the GPU here computes every type right, and which transports carry its arrays"))
    parser.add_argument("--device-buffers", action="store_true",
                        help="fail when MPI cannot carry them")
    parser.add_argument("--module", action="append", default=[], metavar="NAME",
                        help="fail when it is not loaded; may be repeated")
    parser.add_argument("--out", metavar="DIR", help="fail when results cannot be written there")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS",
                        help="that a child job may take (default 60)")
    parser.add_argument("--seen", metavar="DIR",
                        help="start no child job: read what bench.census has said into this "
                             "folder, as batch jobs do")
    parser.add_argument("--clean", action="store_true", help=(
        "remove the shared memory that killed jobs of this user have left in /dev/shm, where no "
        "process has it open; those of a container that shares the folder are not seen: not "
        "while one runs a job"))
    parser.add_argument("--json", action="store_true", help="machine-readable")


def add_reproduce(verbs, rows: argparse.ArgumentParser) -> None:
    """Add ``reproduce``, with the options of `rows` and its own."""
    parser = verbs.add_parser("reproduce", parents=[rows], help=(
        "measure all selected rows, starting mpirun for each rank count, then the tables and "
        "figures; goes on where an earlier one was stopped"))
    parser.add_argument("--ranks", type=_numbers, metavar="P,...", help=(
        "only rows of so many ranks; for schemes that the paper lacks, any number (default: all)"))
    parser.add_argument("--fresh", action="store_true", help=(
        "measure every row anew, also those that an earlier one, which was stopped, has finished"))


def _add_layer(verbs) -> None:
    layer = _verb(verbs, "layer", "under mpirun: one Transformer layer, forward and backward, "
                  "beside one process' PyTorch", 7, 60.0)
    layer.add_argument("--hidden", type=_numbers, default=[512, 1024, 2048], metavar="N,...",
                       help="(default 512,1024,2048)")
    layer.add_argument("--head", type=int, default=64, metavar="N",
                       help="features of a head (default 64)")
    layer.add_argument("--batch", type=int, default=8, metavar="N", help="(default 8)")
    layer.add_argument("--seq", type=int, default=512, metavar="N", help="(default 512)")
    _dtype_option(layer)
    layer.add_argument("--scheme", default="3d", metavar="NAME", help="(default 3d)")
    _grid_option(layer)
    layer.add_argument("--torch", metavar="PYTHON", help=(
        "an interpreter that has PyTorch, which the layer is then verified with and measured "
        "beside (default: verified with the serial scheme, measured alone)"))
    layer.add_argument("--overlap", action="store_true", help=(
        "measure it also with communication that goes on while ranks multiply"))


def _add_gpu(verbs) -> None:
    gpu = _verb(verbs, "gpu", "what one GPU achieves: products, elementwise kernels, one layer "
                "beside PyTorch's, and a rank's part of each row of both tables", 10, 5.0)
    gpu.add_argument("--part", type=_names(*GPU_PARTS), default=list(GPU_PARTS), metavar="NAMES",
                     help=f"of {', '.join(GPU_PARTS)} (default: all)")
    gpu.add_argument("--graph", action="store_true", help=(
        "measure the layer also as a CUDA graph, all of a step launched at once"))
    gpu.add_argument("--scale", default="paper", choices=("paper", "tiny"),
                     help="full size, or a rehearsal (default paper)")


def add_files(verbs) -> None:
    """Add ``merge`` and ``validate``."""
    merge = verbs.add_parser("merge", help="join the runs of files and folders in one new file")
    merge.add_argument("target", metavar="OUT", help="the new file, such as all.h5")
    validate = verbs.add_parser("validate", help=(
        "check files against the schema and the rules of a run; explain each violation"))
    for parser in (merge, validate):
        parser.add_argument("sources", metavar="FILE", nargs="+",
                            help="a file of one run, a merged one, or a folder of them")


def _verb(verbs, name: str, about: str, repetitions: int, seconds: float,
          writes: bool = True) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=about)
    if writes:
        parser.add_argument("--out", metavar="DIR",
                            help="where the .h5 files go (default results/<machine>)")
        parser.add_argument("--backend", metavar="NAME",
                            help="the array library (default MM3D_BACKEND, or numpy)")
    parser.add_argument("--repetitions", type=int, default=repetitions, metavar="N",
                        help=f"the least number that count (default {repetitions})")
    parser.add_argument("--max-repetitions", type=int, metavar="N",
                        help="the greatest (default 30, or the least number)")
    parser.add_argument("--max-seconds", type=float, default=seconds, metavar="S",
                        help=f"of each measurement, once the least number is done (default "
                             f"{seconds:g})")
    parser.add_argument("--width", type=float, default=0.05, metavar="FRACTION",
                        help="of the median, that the 95 %% confidence interval may have "
                             "(default 0.05)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N",
                        help="of numbers and order (default 0)")
    add_stall(parser)
    return parser


def add_stall(parser: argparse.ArgumentParser) -> None:
    """Give a verb that ranks run the option of `bench.watch`."""
    parser.add_argument("--stall", type=whole(1), metavar="SECONDS", help=(
        "end the job when nothing is heard of a rank for so long; in the steps that run counts "
        "and times, and the calls that matmul times, also when ranks wait in collectives and none "
        "works, and say in which layer and collective each rank is (default: never)"))


def _shape_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=shape, action="append", required=True, metavar="M,N,K",
                        help="C is M x K, the sum has N terms; N alone for cubes; may be repeated")


def _dtype_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))


def _grid_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=_sizes, metavar="XxYxZ",
                        help="such as 2x2x2 (default: a cube; a square for 2d, a line for 1d)")


def _machine_options(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--machine", metavar="FILE", help=(
        f"put {what} into this machine file too, a .toml file for --machine of plan, predict and "
        f"check; it is made where there is none"))
    parser.add_argument("--base", metavar="NAME", help=(
        "the machine that a new file has all else from (default cpu)"))


def _positive(text: str, separator: str) -> list[int]:
    numbers = [int(word) for word in text.lower().split(separator)]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def whole(least: int):
    """What makes of a text a whole number of at least so many."""
    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least {least} "
                                             f"would do")
        return found
    return number


def recompute(text: str) -> str:
    """The name of a policy of `mm3d.recompute`."""
    try:
        policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _numbers(text: str) -> list[int]:
    try:
        return _positive(text, ",")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of at least 1 with commas "
                                         f"between would do, such as 256,512") from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(_positive(text, "x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes of at least 1 with x between would "
                                         f"do, such as 2x2x2") from None


def shape(text: str) -> tuple[int, ...]:
    """M, N and K of ``M,N,K``, or of one number for all."""
    return sizes("M,N,K")(text if "," in text else ",".join([text] * 3))


def sizes(names: str):
    """What makes of a text as many whole numbers of at least 1 as there are names."""
    count = len(names.split(","))

    def several(text: str) -> tuple[int, ...]:
        found = _numbers(text)
        if len(found) != count:
            raise argparse.ArgumentTypeError(f"{text!r}: {COUNTS[count]} sizes {names} would do"
                                             + ", or one" * (count == 3))
        return tuple(found)
    return several


def _names(*known: str):
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown: choose of "
                                                 f"{', '.join(known)}")
        return found
    return names
