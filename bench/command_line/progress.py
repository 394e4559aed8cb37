"""Show the progress of many rows, or of one search, on a terminal or in a log."""

import time

from tqdm import tqdm

from mm3d.console import complain, say


class RowProgress:
    """Show the number of rows done: a bar on a terminal, a line for each row in a log.

    `failures` and `left_out` are the lines of rows that ended so.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.start = total, done, time.monotonic()
        self.failures: list[str] = []
        self.left_out: list[str] = []
        self._bar = tqdm(total=total, initial=done, unit="row", disable=None, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        with tqdm.external_write_mode():
            say(line)

    def row(self, line: str) -> None:
        """Print a line that ends a row; it begins with "done", "failed" or "left out"."""
        self.done += 1
        for outcome, lines in (("failed", self.failures), ("left out", self.left_out)):
            if line.startswith(outcome):
                lines.append(line)
        elapsed = tqdm.format_interval(time.monotonic() - self.start)
        self.say(f"[{self.done:2d}/{self.total} {elapsed}] {line}")
        self._bar.update()

    @property
    def measured(self) -> int:
        """The number of rows that have results."""
        return self.done - len(self.failures) - len(self.left_out)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class StatusLine:
    """Say what is done now: on a terminal in one line, in a log by a line from time to time.

    Lines of a log go to standard error, at least `every` seconds after the last, or the begin.
    """

    def __init__(self, every: float = 30.0) -> None:
        self.every = every

    def __enter__(self) -> "StatusLine":
        self._bar = tqdm(bar_format="{desc}", disable=None, dynamic_ncols=True, leave=False)
        self._last = time.monotonic()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.close()

    def show(self, line: str) -> None:
        """Put a line in place of the one before, or after it if that is old enough."""
        if not self._bar.disable:
            self._bar.set_description_str(line)
        elif time.monotonic() - self._last >= self.every:
            complain(line)
            self._last = time.monotonic()
