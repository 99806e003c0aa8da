"""Plain text for people: at most 80 columns, and colours and a moving bar only where a terminal shows them."""

import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

MAX_WIDTH = 80
_BAR_WIDTH = 40
_LABEL_WIDTH = 9


class Screen:
    """Writes to `stream`, at once: what is on it is what has happened.

    Colours are bold, green and red, which light and dark terminals both show; none with NO_COLOR, without a terminal,
    or on a dumb one.
    """

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._stream = stream
        self._moves = stream.isatty() and environ.get("TERM") != "dumb"
        self._colours = self._moves and not environ.get("NO_COLOR")
        self._width = min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)

    def line(self, text: str = "") -> None:
        print(text, file=self._stream, flush=True)

    def heading(self, text: str) -> None:
        self.line()
        self.line(self._styled(text, "1"))

    def paragraph(self, text: str) -> None:
        self.line(self._wrapped(text, "  ", "  "))

    def command(self, words: Sequence[str]) -> None:
        """A command line that can be pasted into a shell, long ones broken with backslashes."""
        lines = ["  $"]
        for word in map(shlex.quote, words):
            if len(lines[-1]) + len(word) + len("  \\") > self._width and lines[-1].strip() != "$":
                lines[-1] += " \\"
                lines.append("     ")
            lines[-1] += f" {word}"
        self.line("\n".join(lines))

    def field(self, label: str, text: str) -> None:
        """`text` beside its label."""
        self.line(self._wrapped(text, f"    {label:<{_LABEL_WIDTH}}", " " * (4 + _LABEL_WIDTH)))

    def row(self, *cells: object) -> None:
        """A row of a table: a name, then up to two columns of figures."""
        name, *figures = cells
        self.line(f"    {name!s:<34}" + "".join(f"{figure!s:>14}" for figure in figures))

    def progress(self, done: int, total: int) -> None:
        """`done` of `total`: a bar that the next line replaces, or without a terminal a line for each quarter."""
        if self._moves:
            filled = _BAR_WIDTH * done // total
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            print(f"\r  [{bar}] {done} of {total}", end="", file=self._stream, flush=True)
            if done == total:
                print("\r\x1b[K", end="", file=self._stream, flush=True)
        elif 4 * done // total > 4 * (done - 1) // total:
            self.line(f"  {done} of {total}")

    def verdict(self, good: bool, text: str) -> None:
        label = "ok" if good else "FAILED"
        wrapped = self._wrapped(text, f"  {label}  ", " " * (len(label) + 4))
        self.line(wrapped.replace(label, self._styled(label, "1;32" if good else "1;31"), 1))

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text

    def _wrapped(self, text: str, first: str, rest: str) -> str:
        return textwrap.fill(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
