"""Count the activations that a schedule keeps on each rank."""

from fractions import Fraction

from mm3d.training.schedules.schedule import Schedule


def peak_in_flight(schedule: Schedule, kept: Fraction | int = 0) -> tuple[Fraction, ...]:
    """Return the largest number of micro-batches in flight on each rank.

    A micro-batch is in flight in a stage from the begin of its forward on.

    Parameters
    ----------
    schedule : Schedule
        One that passes `mm3d.training.schedules.check.check`.
    kept : Fraction or int
        The share of a micro-batch's activations that the gradient of the weights still needs: 0
        counts to the end of B, 1 to the end of W.

    Returns
    -------
    tuple of Fraction
        By rank, in activations of one micro-batch in one stage: with several chunks a rank a
        stage has a part of the rank's layers only.
    """
    released = {"B": 1 - Fraction(kept), "W": Fraction(kept), "BW": Fraction(1)}
    peaks = []
    for row in schedule.rows:
        held = peak = Fraction(0)
        for action in row:
            held += 1 if action.kind == "F" else -released[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
