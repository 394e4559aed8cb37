"""Trainings on several meshes: how far each is from the training on one rank."""

import numpy as np

from bench.document import Column, Notes, Part, make_table
from bench.records.kinds import Derived, each, require_as_many
from bench.records.measurements import Measurements, Place, list_places

SCHEMAS = {
    "training-meshes": {
        "verified": True,
        "positive": "ranks",
        "settings": (
            "batch clip dropout dtype equal_to heads hidden layers lr momentum optimizer seq "
            "steps text tied warmup weight_decay"),
        "optional": dict.fromkeys(("chosen_difference", "dropped_difference", "dropped_share"),
                                  "mesh"),
        "needs": {"dropped_share": "experts_count experts_top experts_gate experts_convention"},
        "variables": {
            "bitwise": "mesh", "gradients_difference": "mesh", "loss": "mesh step",
            "ranks": "mesh", "weights_difference": "mesh"},
        "derived": {"loss_difference": "mesh"}}}

ROUTED = ("chosen", "dropped")    # pairs of a token and a choice that meshes are compared by
ROUNDED = (" That is 4 times the difference of one rank to float64 from the same parameters; of "
           "the loss at least 4 times what is usual in one step.")


def derive(record: Measurements) -> Derived:
    """Return the largest relative difference of a loss of each mesh."""
    return {"loss_difference": (loss_differences(record).max(axis=1), "1")}


def check_texts(run: Measurements) -> None:
    """Check that each mesh has another, or itself, that it equals, and bounds of differences."""
    require_as_many("configuration/equal_to", str(run.configuration["equal_to"]).split("; "),
                    run.scales["mesh"], "mesh")
    bounded = {check.quantity.partition(" of ")[0] for check in run.checks}
    if missing := {"loss", "gradients", "weights"} - bounded:
        raise ValueError(f"verification/quantity has no {' or '.join(sorted(missing))} of a mesh")


def loss_differences(record: Measurements) -> np.ndarray:
    """Compute the relative difference of each mesh's loss to one rank's, (mesh, step)."""
    losses, meshes = record.raw["loss"].values, list(record.scales["mesh"])
    names = str(record.configuration.get("one_rank", "; ".join(meshes[:1] * len(meshes))))
    expected = losses[[meshes.index(name) for name in names.split("; ")]]
    return np.abs(losses - expected) / expected


@each
def tables(record: Measurements) -> list[Part]:
    """Make the table of meshes: the largest differences to one rank, and equality of bits."""
    group = "largest relative difference to one rank"
    columns = [
        Column("mesh", of=lambda at: at["mesh"]),
        Column("ranks", of=lambda at: int(at("ranks"))),
        *(Column(name, "", group, form=".1e", of=lambda at, name=name: at(f"{name}_difference"))
          for name in ("loss", "gradients", "weights")),
        *(Column(name, "", "pairs of other experts",
                 of=lambda at, name=name: int(at(f"{name}_difference")))
          for name in ROUTED if f"{name}_difference" in record.variables),
        Column("bits", of=lambda at: _other(at) and (
            "equal" if at("bitwise") == 1 else "DIFFERENT")),
        Column("equal to", align="<", of=_other)]
    return [make_table("The same training on several meshes", columns,
                       list_places(record, "mesh")), Notes("About these:", _notes(record))]


def _other(at: Place) -> str:
    """Return the mesh that a mesh must be equal to; "" for itself."""
    name = str(at["equal_to"]).split("; ")[at.at["mesh"]]
    return "" if name == at["mesh"] else name


def _notes(record: Measurements) -> list[str]:
    chosen, bounds = record.configuration, allowed_differences(record)
    return [
        f"{chosen['steps']} steps of {chosen['optimizer']} (lr {chosen['lr']:g}), "
        f"{chosen['dtype']}: {chosen['layers']} layers, hidden {chosen['hidden']}, "
        f"{chosen['heads']} heads, batches of {chosen['batch']} x {chosen['seq']} bytes of "
        f"{chosen['text']}, dropout {chosen['dropout']:g}.",
        "Loss: of any step. Gradients: of the last step, weights: after it; of the array that "
        "differs most, relative in the Frobenius norm. At most "
        f"{bounds['loss']:.2g}, {bounds['gradients']:.2g} and {bounds['weights']:.2g} pass."
        + ROUNDED * any(check.quantity.startswith("rounding: ") for check in record.checks),
        "Bits: losses, gradients and weights must be equal to the bit where only stages, "
        "schedule, ZeRO or recomputation are different, since these change the order of no "
        "sum; but with several micro-batches ZeRO 2 and 3 sum in another order than 0 and 1, and "
        "are equal to each other.", *_routed_alike(record)]


def _routed_alike(record: Measurements) -> list[str]:
    """Describe the experts and how routing was compared; nothing for a model without experts."""
    chosen = record.configuration
    if "dropped_share" not in record.variables:
        return []
    dropped = 100 * record.values("dropped_share")
    return [f"{chosen['experts_count']} experts, top {chosen['experts_top']}, gate "
            f"{chosen['experts_gate']}, convention {chosen['experts_convention']}: "
            f"{dropped.min():.1f} to {dropped.max():.1f} % of the pairs of a token and a choice "
            f"were dropped. Tokens are routed together that belong to one micro-batch, so a mesh "
            f"is compared with one rank that has as many micro-batches. Chosen and dropped: how "
            f"many pairs of all steps and layers other experts got, or dropped, than there; none "
            f"pass."]


def allowed_differences(record: Measurements) -> dict[str, float]:
    """Return the largest differences that pass, of loss, gradients and weights, by their names."""
    return {check.quantity.partition(" ")[0]: check.tolerance for check in record.checks
            if " of " in check.quantity and not check.quantity.startswith("bits ")}
