"""Draw losses by step: of a training, and of trainings on several meshes."""

import os
from pathlib import Path

import numpy as np

from bench.records.kinds.training_meshes import allowed_differences, loss_differences
from bench.records.measurements import Measurements
from bench.reports.figures import style

SIZE = (9.0, 4.6)    # inches
FLOOR = 20           # differences below eps over this are drawn as 0


def training_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of a record of kind "training", beside PyTorch's if it trained too.

    Path and errors are those of `style.save_picture`.
    """
    found = {name: variable.values for name, variable in record.variables.items()}
    steps, validated = (np.array(record.scales[name]) for name in ("step", "validated"))
    chosen = record.configuration

    def make():
        figure, panels = style.make_figure(1, 1, SIZE, (
            f"{chosen['layers']} layers of {chosen['hidden']} features learn the bytes of "
            f"{chosen['text']}"))
        panel = panels.flat[0]
        panel.plot(steps, found["loss"], color=style.LIGHT_GREY, linewidth=0.8,
                   label="training batch")
        if "torch_validation_loss" in found:
            panel.plot(validated, found["torch_validation_loss"], color=style.VERMILION,
                       marker="o", markersize=8, fillstyle="none", label="validation, PyTorch")
        panel.plot(validated, found["validation_loss"], color=style.BLUE, marker="^",
                   markersize=4, label="validation, mm3d")
        panel.set(xlabel="step", ylabel="cross entropy (nats a byte)", xlim=(0, None))
        panel.legend()
        return figure
    return style.save_picture(path, make, dpi=110)


def meshes_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of a record of kind "training-meshes", and how far they are from one rank's.

    Path and errors are those of `style.save_picture`.
    """
    losses, steps = record.variables["loss"].values, np.array(record.scales["step"])
    apart = loss_differences(record)
    count, dtype = len(losses), str(record.configuration["dtype"])
    eps, allowed = np.finfo(dtype).eps, allowed_differences(record).get("loss", 1e-12)
    floor = eps / FLOOR    # the sum of the loss is float64, so a difference may be smaller

    def make():
        figure, (panels,) = style.make_figure(
            1, 2, (11.0, 4.6), f"The same training on {count} meshes, {dtype}")
        for n in range(count):
            colour, marker = style.CYCLE[n % len(style.CYCLE)]
            width = 1 + 7 * (1 - n / count)    # lines below show at the edges of those above
            panels[0].plot(steps, losses[n], color=colour, linewidth=width,
                           solid_capstyle="butt")
            if n:
                panels[1].plot(steps, np.maximum(apart[n], floor), color=colour, marker=marker,
                               markersize=4, linewidth=0.8)
        panels[0].set(xlabel="step", ylabel="cross entropy (nats a byte)",
                      title="losses of all meshes, on each other")
        panels[1].axhline(allowed, color=style.DARK_GREY, linestyle="--", label="allowed")
        panels[1].axhline(eps, color=style.DARK_GREY, linestyle=":", label=f"eps of {dtype}")
        panels[1].set(xlabel="step", ylabel="relative difference of the loss (1)", yscale="log",
                      ylim=(floor / 2, 10 * allowed),
                      title=f"to the loss of one rank (at the bottom: below eps / {FLOOR})")
        style.label_powers(panels[1].yaxis)
        panels[1].legend()
        return figure
    return style.save_picture(path, make, dpi=110)
