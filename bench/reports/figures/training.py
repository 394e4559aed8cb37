"""Draw losses by step: of a training, and of trainings on several meshes."""

import os
from pathlib import Path

import numpy as np

from bench.records.measurements import Measurements
from bench.reports.figures import style
from bench.reports.figures.schedules import check_name

SIZE = (9.0, 4.6)    # inches
FLOOR = 1e-17        # drawn for no difference


def training_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of a training, beside PyTorch's if it trained too.

    Parameters
    ----------
    path : path
        The picture to write; a .png, .svg or .pdf.
    record : Measurements
        Of kind "training".

    Raises
    ------
    UsageError
        When it is to be of another kind.
    """
    check_name(path)
    found = {name: variable.values for name, variable in record.variables.items()}
    steps, validated = (np.array(record.scales[name]) for name in ("step", "validated"))
    chosen = record.configuration
    with style.figure_style():
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
        style.save_figure(figure, path, dpi=110)
    return Path(path)


def meshes_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of trainings on several meshes, and how far they are from one rank's.

    Parameters and errors as those of `training_picture`; the record is of kind "training-meshes".
    """
    check_name(path)
    losses, steps = record.variables["loss"].values, np.array(record.scales["step"])
    apart = np.abs(losses - losses[0]) / losses[0]
    count = len(losses)
    with style.figure_style():
        figure, (panels,) = style.make_figure(
            1, 2, (11.0, 4.6), f"The same training on {count} meshes, "
            f"{record.configuration['dtype']}")
        for n in range(count):
            colour, marker = style.CYCLE[n % len(style.CYCLE)]
            width = 1 + 7 * (1 - n / count)    # those below can be seen beside those above
            panels[0].plot(steps, losses[n], color=colour, linewidth=width,
                           solid_capstyle="butt")
            if n:
                panels[1].plot(steps, np.maximum(apart[n], FLOOR), color=colour, marker=marker,
                               markersize=4, linewidth=0.8)
        panels[0].set(xlabel="step", ylabel="cross entropy (nats a byte)",
                      title="losses of all meshes, on each other")
        panels[1].axhline(1e-12, color=style.DARK_GREY, linestyle="--", label="allowed")
        panels[1].axhline(np.finfo(float).eps, color=style.DARK_GREY, linestyle=":",
                          label="eps of float64")
        panels[1].set(xlabel="step", ylabel="relative difference of the loss (1)", yscale="log",
                      ylim=(FLOOR / 2, 1e-11),
                      title="to the loss of one rank (at the bottom: none)")
        style.label_powers(panels[1].yaxis)
        panels[1].legend()
        style.save_figure(figure, path, dpi=110)
    return Path(path)
