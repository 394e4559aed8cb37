"""Read the sizes and the architecture of a model from Hugging Face's ``config.json``.

What the library does not compute is refused, with all of its names in one message.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mm3d.config import Model
from mm3d.hugging_face.families import DECODER, FAMILIES, NEUTRAL, QWEN_EXPERTS, Family
from mm3d.model.architecture import INNER_FACTOR, PLAIN, Architecture
from mm3d.model.experts.options import PLAIN_DESIGN, ExpertDesign, check_experts_given
from mm3d.model.experts.layer import Experts

CONFIG = "config.json"
TRUTHS = ("tie_word_embeddings", "use_sliding_window", "output_router_logits", "norm_topk_prob")
# Keys of `mm3d.Architecture.rotary_scaling`, in its order.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the keys of a configuration; `path` is its file, or a folder that has it.

    Raises OSError when it cannot be read; ValueError when it is no object of JSON.
    """
    path = Path(path)
    path = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there: give a {CONFIG} of Hugging Face, or the "
                                f"folder that has it") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no configuration: an object with a model_type would do")
    return found


def model_from_config(path: str | Path, *, batch: int, seq: int, **fields: Any) -> Model:
    """Return the model of a ``config.json`` of Hugging Face.

    Parameters
    ----------
    path : path
        The file, or its folder.
    batch, seq : int
        As in `mm3d.Model`.
    **fields
        Further fields of it, such as dtype and seed; dropout is none unless it is given.

    Raises
    ------
    OSError
        When the file cannot be read.
    ValueError
        Naming everything in the file that nothing here computes, and for sequences that are
        longer than its table of positions.
    """
    found = model_fields(read_config(path), str(path))
    return Model(**{"seq": take_length(found, seq, str(path))} | found | {"batch": batch} | fields)


def take_length(found: dict[str, Any], seq: int | None, name: str) -> int:
    """Return the length of sequences, `seq` or the longest; take "positions" out of the fields.

    Messages call the model `name`.  Raises ValueError when a table of positions ends before.
    """
    positions = found.pop("positions")
    if seq is not None and found["architecture"].positions == "learned" and seq > positions:
        raise ValueError(f"seq={seq}: the table of positions of {name} ends at {positions}: that "
                         f"at most would do")
    return positions if seq is None else seq


def model_fields(config: Mapping[str, Any], name: str = "the configuration") -> dict[str, Any]:
    """Return the fields of a `mm3d.Model` that the keys of a ``config.json`` state.

    As "positions" they have the longest sequence that the model was made for.  Messages call the
    configuration `name`.  Raises ValueError naming everything that is not computed here, or sizes
    that are missing or no numbers.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = NEUTRAL.union(*(one.known for one in FAMILIES.values()))
        own = "".join(f", {key}" for key in sorted(set(config) - known))
        raise ValueError(f"{name} has features that nothing here computes: model_type={kind!r}"
                         f"{own}; model_type {', '.join(FAMILIES)} would do")
    given = {**family.defaults, **config}
    refused = [f"{key}={config[key]!r}" for key in config if key not in family.known]
    refused += [f"{key}={given[key]!r} (true or false would do)" for key in TRUTHS
                if not isinstance(given.get(key, True), bool)]
    refused += [f"{key}={given[key]!r} ({' or '.join(map(repr, values))} would do)"
                for key, values in (DECODER | family.only).items()
                if key in given and given[key] not in values]
    found: dict[str, Any] = dict(family.architecture)
    found |= {field: given.get(key) for field, key in family.keys.items()}
    if family.rotary:
        found |= _rotary(given, refused)
    if family.window:
        found["window"] = _window(given, given.get(family.sizes["layers"]), refused)
    if refused:
        raise ValueError(f"{name} has features that nothing here computes: {', '.join(refused)}")
    sizes = {field: _size(name, key, given.get(key)) for field, key in family.sizes.items()}
    if family.rotary:    # of these no model has a width that is a multiple by default
        _size(name, family.keys["inner"], given.get(family.keys["inner"]))
    found = {field: _plain_size(name, field, value, sizes) for field, value in found.items()}
    architecture = Architecture(**found)
    architecture.check()
    experts = _experts(name, given, family.experts) if family.experts else None
    check_experts_given(experts, sizes["layers"])
    return sizes | {"tied": given["tie_word_embeddings"], "architecture": architecture,
                    "experts": experts}


def _rotary(given: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Return the base and the scaling of rotary embeddings; append what is not known."""
    # as of transformers 5, and before
    scaling = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        refused.append(f"rope_scaling={scaling!r} (an object would do)")
        return {}
    scaling = dict(scaling)
    found = {"rotary_base": scaling.pop("rope_theta", given["rope_theta"]),
             "rotary_scaling": None}
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))    # which takes both out
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        refused.append("partial_rotary_factor")
    if kind == "llama3":
        missing = [key for key in LLAMA3 if key not in scaling]
        refused += [f"rope_type='llama3' without {key}" for key in missing]
        if not missing:
            found["rotary_scaling"] = tuple(scaling.pop(key) for key in LLAMA3)
    elif kind != "default":
        refused.append(f"rope_type={kind!r} ('default' or 'llama3' would do)")
        return found
    refused += [f"{key} of rotary embeddings" for key in scaling]
    return found


def _window(given: Mapping[str, Any], layers: Any, refused: list[str]) -> int | None:
    """Return the window of attention; append what differs between layers."""
    window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
    types = given.get("layer_types") or ()
    if not isinstance(types, (list, tuple)):
        refused.append(f"layer_types={types!r}")
        return None
    kinds = {*map(str, types)}
    if kinds - {"full_attention", "sliding_attention"}:
        refused.append(f"layer_types={sorted(kinds)}")
    elif len(kinds) > 1:
        refused.append("layer_types that differ between layers")
    elif kinds:
        return window if kinds == {"sliding_attention"} else None
    elif window is not None and (first := given.get("max_window_layers") or 0):
        if not type(first) is type(layers) is int:
            refused.append(f"max_window_layers={first!r} of {layers!r} layers")
        elif first < layers:
            refused.append(f"max_window_layers={first}, so that layers have different windows")
        return None
    return window


def _experts(name: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> Experts:
    """Return the experts, which drop no token: Mixtral's, or Qwen's where there are its keys."""
    count, top = (_size(name, key, given[key]) for key in keys[:2])
    balance = given["router_aux_loss_coef"] if given.get("output_router_logits") else 0.0
    every, gate, design = 1, "mixtral", PLAIN_DESIGN
    if keys == QWEN_EXPERTS:
        every, width, shared = (_size(name, key, given[key]) for key in (keys[4], *keys[6:]))
        gate = "mixtral" if given[keys[5]] else "switch"    # divided by the sum of the chosen
        design = ExpertDesign(width, shared, True)
    return Experts(count, top, every=every, capacity=None, gate=gate, balance=balance, z=0.0,
                   convention="huggingface", design=design)


def _size(name: str, key: str, value: Any) -> int:
    """Return a size; ValueError unless it is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: {key}={value!r} should be a whole number of at least 1")
    return value


def _plain_size(name: str, field: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """Return a field of an architecture; None where it is the default of the sizes."""
    if field == "kv_heads" and value == sizes["heads"]:
        return None
    if field == "head" and type(value) is int and value * sizes["heads"] == sizes["hidden"]:
        return None
    return None if field == "inner" and value == INNER_FACTOR * sizes["hidden"] else value


def config_of(model: Model) -> dict[str, Any]:
    """Return the configuration of a model, the inverse of `model_fields`.

    Raises ValueError when no family computes the same.
    """
    architecture, experts = model.architecture, model.experts
    kind = _family_of(architecture, experts)
    family = FAMILIES[kind]
    values = {key: values[0] for key, values in family.only.items()}
    values |= {key: model.seq if field == "positions" else getattr(model, field)
               for field, key in family.sizes.items()}
    values |= {key: getattr(architecture, field) for field, key in family.keys.items()}
    if family.rotary:
        values["rope_theta"] = architecture.rotary_base
        values |= {"num_key_value_heads": architecture.kv_heads or model.heads,
                   "intermediate_size": architecture.inner or INNER_FACTOR * model.hidden}
        if architecture.rotary_scaling is not None:
            values["rope_scaling"] = {"rope_type": "llama3"} | dict(
                zip(LLAMA3, architecture.rotary_scaling))
    if family.window:
        values["sliding_window"] = architecture.window
        if kind.startswith("qwen2"):
            values["use_sliding_window"] = architecture.window is not None
            values["max_window_layers"] = 0 if architecture.window else model.layers
    if experts is not None:
        values |= dict(zip(family.experts, (
            experts.count, experts.top, experts.balance > 0, experts.balance, experts.every,
            experts.gate == "mixtral", experts.design.width, experts.design.shared)))
    return {"architectures": [family.name], "model_type": kind, **values,
            "tie_word_embeddings": model.tied}


def _family_of(architecture: Architecture, experts: Any) -> str:
    """Return the first family that has an architecture; ValueError where none does."""
    for kind, family in FAMILIES.items():
        free = {*family.keys, *(("rotary_base", "rotary_scaling") if family.rotary else ()),
                *(("window",) if family.window else ())}
        plain = replace(PLAIN, **family.architecture)
        same = all(getattr(architecture, one.name) == getattr(plain, one.name)
                   for one in fields(architecture) if one.name not in free)
        if same and (experts is None if not family.experts else _of_family(experts, family)):
            return kind
    raise ValueError(f"no family of Hugging Face has the architecture {architecture.given()} and "
                     f"experts={experts}: those of {', '.join(FAMILIES)} would do")


def _of_family(experts: Experts | None, family: Family) -> bool:
    """Return whether experts are those of a Mixtral, or of a Qwen with that family's keys."""
    if experts is None or experts.capacity is not None:
        return False
    if family.experts == QWEN_EXPERTS:
        own = ExpertDesign(experts.design.width, experts.design.shared, True)
        return (experts.gate in ("switch", "mixtral") and None not in (own.width, own.shared)
                and experts.design == own)
    return (experts.every, experts.gate, experts.design) == (1, "mixtral", PLAIN_DESIGN)
