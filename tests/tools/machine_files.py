"""Checks and texts of machine models that several tests share."""
import msgspec

from bench.prediction.machine_file import format_tree
from bench.prediction.machine_model import Machine, load_machine


def format_machine(machine: Machine) -> str:
    """A machine's file, as `calibrate` writes it."""
    return format_tree(msgspec.to_builtins(machine, str_keys=True))


def write_machine(folder, **figures) -> str:
    """The file of a machine like the processor but for some figures."""
    path = folder / "mine.toml"
    path.write_text(format_machine(msgspec.structs.replace(load_machine("cpu"), **figures)))
    return str(path)


def assert_sourced(machine):
    """What a file leaves at its default, or has as nothing, needs no source."""
    absent = {name for name, default in zip(reversed(machine.__struct_fields__),
                                            reversed(machine.__struct_defaults__))
              if getattr(machine, name) == (default.factory() if hasattr(default, "factory")
                                            else default)}
    figures = set(machine.__struct_fields__) - {"name", "about", "sources"} - absent
    assert figures <= set(machine.sources) <= figures | absent and all(machine.sources.values())
