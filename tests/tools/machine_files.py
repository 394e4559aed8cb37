"""Checks of machine models that several tests share."""


def assert_sourced(machine):
    """What a file leaves at its default, or has as nothing, needs no source."""
    absent = {name for name, default in zip(reversed(machine.__struct_fields__),
                                            reversed(machine.__struct_defaults__))
              if getattr(machine, name) == (default.factory() if hasattr(default, "factory")
                                            else default)}
    figures = set(machine.__struct_fields__) - {"name", "about", "sources"} - absent
    assert figures <= set(machine.sources) <= figures | absent and all(machine.sources.values())
