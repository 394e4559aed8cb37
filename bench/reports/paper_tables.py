"""Make the paper's Tables 1 and 2, measured figures beside published ones."""

import math
from typing import Iterable, Sequence

import numpy as np

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row, load_tables, title
from bench.cases.selection import select_rows
from bench.cases.variants import recorded_variant
from bench.document import Column, Notes, Number, Part, Rows, Table, number_cell
from bench.records import model_run
from bench.records.folder import (FolderContents, Results, RowKey, is_crowded, most_oversubscribed,
                                  row_of, share_cores)
from bench.records.model_run import Run
from bench.records.notes import (counted, describe_cluster, describe_libraries, describe_source,
                                 split_checks)
from bench.reports import certainty, emulated, emulated_tables, merit, micro_tables
from mm3d.tracing.events import PHASES


NOT_PUBLISHED = ("Not published: the paper has no such row. Its sizes are those of the row of "
                 "its table with the nearest number of ranks; of several, with the largest batch.")


def make_document(found: FolderContents) -> list[Part]:
    """Make both of the paper's tables for every preset, the microbenchmarks, and notes."""
    parts = [part for results in found.results for part in preset_parts(results)]
    return parts + micro_tables.make_parts([
        *found.measurements, *emulated.swept_rates(found.rows)])


def make_file(found: FolderContents) -> list[Part]:
    """Make the document for a file, which also says what was left out."""
    return make_document(found) + [Notes("Left out:", found.problems)] * bool(found.problems)


def preset_parts(results: Results) -> list[Part]:
    """Make the tables and notes of one preset."""
    presets = load_tables().presets
    about = presets[results.preset].about if results.preset in presets else ""
    parts: list[Part] = [f"Preset {results.title}: {about}"]
    for name in HEADINGS:
        rows = results.rows(name)
        if not (rows or results.plain):
            continue
        runs = [results.get(row) for row in rows]
        title_of_all = heading(results, name)
        parts.append(paper_table(title_of_all, rows, runs))
        if found := [(row, run) for row, run in zip(rows, runs) if run]:
            parts += [certainty.certainty_table(title_of_all, found),
                      merit.merit_table(title_of_all, found)]
        if results.plain or results.runs.keys() & {(name, PROPOSED, 64)}:
            parts.append(certainty.speed_up_table(title_of_all, name, results))
    parts += emulated_tables.emulated_parts(results)
    parts += merit.row_wire_parts(results)
    others = any(not row.published for name in HEADINGS for row in results.rows(name))
    published = published_notes() + [NOT_PUBLISHED] * others
    return parts + [Notes("About the published figures:", published),
                    Notes("About the measured figures:", measured_notes(results))]


def heading(results: Results, table: str) -> str:
    """Return the heading of one of the paper's tables for a preset."""
    runs = [results.get(row) for row in results.rows(table)]
    return f"{HEADINGS[table]}, preset {results.title}{emulated.state_conditions(runs)}"


def paper_table(heading: str, rows: Sequence[Row], runs: Sequence[Run | None]) -> Table:
    """Make one of the paper's tables, with "missing" for rows that were not measured."""
    times = [_column([run and model_run.typical(run.times[phase]) for run in runs])
             for phase in PHASES]
    times.append(_column([run and run.average for run in runs]))
    lines: Rows = []
    for row, run, *measured in zip(rows, runs, *times):
        sizes = [run.configuration[s] for s in ("batch", "hidden")] if run else ["", ""]
        printed = [number_cell(row.forward, ".3f"), number_cell(row.backward, ".3f"),
                   Number(row.average, f"{row.average:.3f}{' ' if row.consistent else '*'}")]
        known = [row.batch, row.hidden, *printed] if row.published else ["-"] * 5
        name = title(row.scheme) + ", not published" * (not row.published)
        lines.append([name, row.gpus, *known, *sizes, *measured])
    heads = [("batch", "size"), ("hidden", "size"), ("forward", "time (s)"),
             ("backward", "time (s)"), ("average", "step (s)")]
    columns = [Column("", "scheme"), Column("# GPUs", "or ranks"),
               *(Column(*head, group) for group in ("published (GPUs)", "measured (ranks)")
                 for head in heads)]
    return Table(heading, columns, lines)


def inconsistent_notes(rows: Sequence[Row]) -> list[str]:
    """State what is wrong with the average that the paper prints for some of these rows."""
    return [f"* {HEADINGS[row.table]}, {title(row.scheme)} on {row.gpus} GPUs: the paper prints "
            f"{row.average:.3f} s, but its own times give ({row.forward:.3f} + "
            f"{row.backward:.3f}) / {row.batch} = {row.recomputed:.3f} s (equation 6), as "
            f"all other rows do." for row in rows if not row.consistent]


def published_notes() -> list[str]:
    """State the inconsistencies of the paper, from its own figures."""
    notes, ratios = inconsistent_notes(load_tables().rows), {}
    for name in HEADINGS:
        rows = {row.scheme: row for row in select_rows(name) if row.gpus == 64}
        for kind in ("average", "recomputed"):
            ratios[name, kind] = " and ".join(
                f"{getattr(rows[other], kind) / getattr(rows[PROPOSED], kind):.2f}x"
                for other in BASELINES)
    notes.append(f"The paper's speed-ups of 3-D over 1-D and 2-D, {ratios['weak', 'average']}, "
                 f"are given for strong scaling (Section 4.2.2), but they are the ratios of "
                 f"Table 1, weak scaling, with the wrong figure; with the recomputed one Table 1 "
                 f"has {ratios['weak', 'recomputed']}. Table 2, strong scaling, itself has "
                 f"{ratios['strong', 'average']}.")
    return notes


def measured_notes(results: Results) -> list[str]:
    """State how the figures were measured, and what they do not show."""
    runs = results.shown_runs()
    if not runs:
        return [f"None but {counted(results.overridden, 'run')} with sizes given by hand."]
    notes = [f"Model: layers {_all(runs, 'layers')}, sequence {_all(runs, 'seq')}, "
             f"{_all(runs, 'dtype')}, MLP {_all(runs, 'mlp_factor')} x hidden. The published "
             f"figures are from V100 GPUs at the published sizes: compare ratios, not seconds.",
             f"Times: of the slowest rank, the median of at least {_all(runs, 'repetitions')} "
             f"repetitions after {_all(runs, 'warmup')} to warm up.",
             *verified_notes(runs)]
    if not results.plain:
        notes.insert(0, f"VARIANT{results.label.replace(',', ':', 1)}: these rows are "
                        f"computed otherwise than the tables', whose plain rows are apart.")
    notes += waiting_notes(runs)
    notes += (certainty.certainty_notes(runs) + certainty.speed_up_notes(results)
              + merit.merit_notes(runs) + merit.recomputation_notes(runs))
    notes += emulated.emulation_notes(runs)
    alone = emulated.other_runs(runs)
    crowded = [run for run in alone if is_crowded(run)]
    most = most_oversubscribed(alone)
    if most and recorded_variant(most.configuration).waits:
        notes.append(f"CROWDED: in {len(crowded)} of {len(runs)} rows ranks outnumber cores. Up "
                     f"to {most.ranks} ranks {share_cores(most)}: copies, sums, messages and "
                     f"Python take longer than with a core for each.")
    elif most:
        notes.append(f"NOT SCALING RESULTS: in {len(crowded)} of {len(runs)} rows ranks outnumber "
                     f"cores, with up to {most.ranks} ranks on {most.environment['cores']} cores. "
                     f"The ranks take turns, so more ranks cannot be faster; such times compare "
                     f"the total work, copying and waiting of the schemes, nothing else.")
    differ = [merit.row_name(run) for run in runs if not words_agree(run)]
    if differ:
        notes.append(f"The words counted differ from the closed form in: {', '.join(differ)}.")
    missing = [_title(row.key) for row in load_tables().rows if results.get(row) is None]
    if missing and results.plain:
        notes.append(f"Missing, {len(missing)} of {len(load_tables().rows)} rows: "
                     f"{', '.join(missing)}.")
    if results.earlier:
        notes.append(f"Of each row the latest run is shown; the folder also has "
                     f"{counted(results.earlier, 'earlier run')}.")
    if results.overridden:
        notes.append(f"Not shown: {counted(results.overridden, 'run')} with sizes given by hand.")
    return notes + machine_notes(results)


def waiting_notes(runs: Sequence[Run]) -> list[str]:
    """State what ranks waited for instead of computing; nothing if all computed."""
    waiting = [run for run in runs if recorded_variant(run.configuration).waits]
    if not waiting:
        return []
    share = [run.of_group("waits", "counted").sum(axis=0).max()
             / sum(model_run.typical(run.samples[phase]) for phase in PHASES)
             for run in waiting]
    return [f"WAITED WORK: products and elementwise operations take the seconds of the machine "
            f"model {_all(waiting, 'waited_machine')}, shrunk by {_all(waiting, 'waited_shrink')} "
            f"and times {_all(waiting, 'waited_scale')}, in which a rank sleeps; only collectives "
            f"do their work. Of a step {min(share):.0%} to {max(share):.0%} is waited. Results "
            f"were verified in a step that computes, before."]


def verified_notes(runs: Sequence[Run]) -> list[str]:
    """State what was verified before any time was measured, and how."""
    apart = [(run, *split_checks(run.checks)) for run in runs]
    error = max(check.error for _, serial, _ in apart for check in serial)
    notes = [f"Verified first: output and all gradients of every row beside a serial model; the "
             f"largest relative error is {error:.1g}."]
    smaller = [run for run in runs if not run.configuration["verified_measured_model"]]
    own = [check.share for _, _, found in apart for check in found]
    looked = sum(bool(found) for _, _, found in apart)
    if smaller:
        notes.append(f"In {counted(len(smaller), 'row')} that was a smaller model of the same "
                     f"scheme and grid, because a serial model of the measured size does not fit.")
    if looked:
        notes.append(f"In {counted(looked, 'row')} the measured model itself was checked by the "
                     f"residuals of one step, layer by layer: products and their gradients by "
                     f"random vectors, the rest in samples beside float64; the largest is "
                     f"{max(own):.1g} of its tolerance.")
    if len(smaller) > looked:
        notes.append(f"NOT VERIFIED AT ITS SIZE: in {counted(len(smaller) - looked, 'row')} the "
                     f"measured model itself was not checked.")
    return notes


def machine_notes(results: Results) -> list[str]:
    """Describe the environments of the runs, and their rows if there are several environments."""
    found: dict[str, dict[RowKey, None]] = {}
    for run in sorted(results.shown_runs(), key=row_of):
        env = run.environment
        cluster = describe_cluster(env)
        about = (f"{env['cpu_model']}, {env['cores']} cores; {cluster}{'; ' * bool(cluster)}"
                 f"{env['mpi']}; "
                 f"{describe_libraries(env, 'with {} kernels')}, "
                 f"{counted(env['blas_threads'], 'thread')} a rank; backend {env['backend']}, "
                 f"NumPy {env['numpy_version']}, Python {env['python']}; "
                 f"source {describe_source(env['git_commit'], env['git_clean'])}.")
        found.setdefault(about, {})[row_of(run)[0]] = None
    every = set().union(*found.values())
    return [f"Machine{f' of {_together(keys, every)}' * (len(found) > 1)}: {about}"
            for about, keys in found.items()]


def _together(keys: Iterable[RowKey], every: set[RowKey]) -> str:
    """Join the names of rows; all measured rows of a table get one name."""
    names = []
    for table in sorted({key[0] for key in keys}):
        mine = [key for key in keys if key[0] == table]
        whole = len(mine) == sum(key[0] == table for key in every)
        names += [f"all {table} rows"] if whole else map(_title, mine)
    return ", ".join(names)


def words_agree(run: Run) -> bool:
    """Return whether the words counted on all ranks equal those of the closed form."""
    return np.array_equal(run.traffic["words"].sum(axis=1), run.expected_words)


def _title(key: RowKey) -> str:
    return f"{key[0]} {title(key[1])} {key[2]}"


def _all(runs: list[Run], setting: str) -> str:
    """Return the value of a setting in all runs, or its values joined by "or"."""
    found = sorted({run.configuration[setting] for run in runs})
    return " or ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in found)


def _column(seconds: Iterable[float | None]) -> list[Number]:
    """Format seconds so that the least of them has three significant digits."""
    seconds = list(seconds)
    found = [value for value in seconds if value]
    decimals = min(9, max(0, 2 - math.floor(math.log10(min(found))))) if found else 0
    return [number_cell(value or math.nan, f".{decimals}f", "missing") for value in seconds]
