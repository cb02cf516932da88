"""The terminal as a screen: taken over for a while, drawn without flicker, and given back however the while ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from contextlib import suppress

from rich.cells import cell_len

from .frame import Line, clipped

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
TAKE, GIVE = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J", "\x1b[?7h\x1b[2J\x1b[H\x1b[?25h\x1b[?1049l"
# one update: a terminal that knows the mode shows nothing half drawn
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
MOST_EMPTY = 50
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Screen:
    """Standard output's terminal, and the keys of standard input if that is one too."""

    def __init__(self, colours: bool):
        self._colours = colours
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._shown: tuple[int, int] | None = None
        self._n_empty = 0

    def __enter__(self) -> Screen:
        # signals arrive as bytes in a pipe, so that one place waits for them and for keys, and none can be missed
        self._heard, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in HEARD}
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._give()
        finally:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            os.close(self._heard)
            os.close(self._wakeup)

    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        with suppress(OSError):
            size = os.get_terminal_size(sys.stdout.fileno())
            if size.columns and size.lines:
                return size.columns, size.lines
        return 80, 24

    def show(self, lines: list[Line]) -> None:
        width, height = self.size()
        parts = [BEGIN]
        if self._shown != (width, height):
            parts.append("\x1b[2J")
            self._shown = width, height
        for row, line in enumerate(lines[:height], 1):
            fitting = clipped(line, width)
            parts += f"\x1b[{row};1H", *(self._styled(text, style) for text, style in fitting)
            # behind a character in the last column the cursor still stands on it: nothing is left to clear there
            if sum(cell_len(text) for text, _ in fitting) < width:
                parts.append("\x1b[K")
        if len(lines) < height:
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        self._write("".join([*parts, END]))

    def wait(self, seconds: float) -> str:
        """A key, the name of a signal, or "" when the time is over."""
        sources = [self._heard] if self._keys is None else [self._heard, self._keys]
        ready = select.select(sources, [], [], max(0.0, seconds))[0]
        if self._heard in ready:
            return signal.Signals(os.read(self._heard, 1)[0]).name
        if self._keys in ready:
            typed = os.read(self._keys, 64)  # never waits: Ctrl-C takes back what was typed before it
            self._n_empty = 0 if typed else self._n_empty + 1
            if self._n_empty > MOST_EMPTY:
                self._keys = None  # the terminal is gone; SIGHUP follows
            # several keys may come in one piece, and those that are no characters as an escape sequence
            return "q" if b"q" in typed.lower() and not typed.startswith(b"\x1b") else "key"
        return ""

    def suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal back until it continues us."""
        self._give()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        if self._keys is not None:
            self._attributes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
            at_once = termios.tcgetattr(self._keys)
            at_once[6][termios.VMIN] = at_once[6][termios.VTIME] = 0
            termios.tcsetattr(self._keys, termios.TCSANOW, at_once)
        self._shown = None
        self._write(TAKE)

    def _give(self) -> None:
        with suppress(OSError):  # a terminal that hung up cannot be told
            self._write(GIVE)
        if self._keys is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._attributes)

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text and self._colours else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
