"""Pictures of commands in a terminal, for the documents.

    python scripts/make_screens.py docs/images/doctor -- kvkeep doctor --model /models/llama

Runs the command in a pseudo-terminal of 80 columns and writes NAME.svg, which is light or dark as
its reader is, and needs no fonts or files from anywhere. ``--seconds 20`` ends a command that would
go on, as Ctrl-C does, and draws its last picture.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 80
#: Whatever is drawn again was erased like this before.
_ERASED = re.compile(r"(?:\r?\x1b\[2K|\x1b\[1A)+")
_CURSOR = re.compile(r"\x1b\[\?25[lh]")
_LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (154, 103, 0), (9, 105, 218), (130, 80, 223),
     (27, 124, 131), (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (125, 78, 0), (33, 139, 255), (164, 117, 249),
     (49, 146, 170), (140, 149, 159)],
)  # fmt: skip
_DARK = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255),
     (57, 197, 207), (177, 186, 196)],
    [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255),
     (210, 168, 255), (86, 212, 221), (240, 246, 252)],
)  # fmt: skip
#: One picture of the two; as rich's own, without a window around it and fonts from elsewhere.
_PART = """\
<g class="{unique_id}"><style>{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect fill="BACKGROUND" stroke="#80808066" x="0.5" y="0.5" width="{width}" height="{height}" rx="8"
/><g transform="translate(14, 14)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="screen">{matrix}</g></g></g>
<!-- {width} {height} {char_height} {line_height} -->
"""
_WHOLE = """\
<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<style>
.screen {{ font: {char_height}px/{line_height}px ui-monospace, SFMono-Regular, Menlo, Consolas,
 "DejaVu Sans Mono", monospace }}
.dark {{ display: none }}
@media (prefers-color-scheme: dark) {{ .dark {{ display: inline }} .light {{ display: none }} }}
</style>
{parts}</svg>
"""
_SIZES = re.compile(r"<!-- (\S+) (\S+) (\S+) (\S+) -->\n")


def run(command: list[str], seconds: float | None) -> str:
    """What a command leaves on a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "100", "TERM": "xterm-256color"}
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, text=False
    )
    os.close(theirs)
    end = None if seconds is None else time.monotonic() + seconds
    data = b""
    while True:
        if select.select([ours], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):
                new = os.read(ours, 1 << 16)
                data += new
                if new:
                    continue
            break
        if end is not None and time.monotonic() > end:
            child.send_signal(signal.SIGINT)
            end = None
    child.wait()
    text = _CURSOR.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    return _ERASED.split(text)[-1]


def picture(command: list[str], text: str) -> str:
    """The SVG, which is light or dark as its reader is."""
    parts = ""
    for name, theme in (("light", _LIGHT), ("dark", _DARK)):
        console = Console(
            record=True,
            width=COLUMNS,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        line = Text.assemble(("$ ", "dim"), (shlex.join(command), "bold"))
        console.print(line, width=COLUMNS)
        console.print(Text.from_ansi(text.rstrip("\n")), width=COLUMNS)
        part = _PART.replace("BACKGROUND", theme.background_color.hex)
        parts += console.export_svg(theme=theme, title="", code_format=part, unique_id=name)
    found = _SIZES.search(parts)
    if found is None:
        raise ValueError("rich has drawn nothing")
    width, height, char_height, line_height = map(float, found.groups())
    return _WHOLE.format(
        width=width + 1,  # half a line's width on each side
        height=height + 1,
        char_height=char_height,
        line_height=line_height,
        parts=_SIZES.sub("", parts),
    )


def main() -> None:
    """Run, and write both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", type=Path)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--shown", help="The command line that the picture shows.")
    middle = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, command = parser.parse_args(sys.argv[1:middle]), sys.argv[middle + 1 :]
    text = run(command, arguments.seconds)
    shown = shlex.split(arguments.shown) if arguments.shown else command
    path = arguments.name.with_suffix(".svg")
    path.write_text(picture(shown, text), encoding="utf-8")
    sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    main()
