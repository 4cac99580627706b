"""What mkdocs does besides reading docs/: the files of the root as pages, links, pictures.

The documents are written to be read in the repository, too. So a link to a file outside of docs/
becomes the page that is made of it, or the plain text; and a drawing that follows the system's
light or dark becomes two, of which the theme shows one. Called by mkdocs (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Files of the root that are pages of the site, and what the page is called.
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: Files of the root that have a page of their own in docs/.
OWN_PAGES = {"README.md": "index.md", "SECURITY.md": "security.md", **ROOT_PAGES}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) *\{((?:[^{}]|\{[^{}]*\})*)\}")
_LOCAL = re.compile(r"(?!(?:[a-z]+:|#))")


def light_and_dark(svg: str) -> tuple[str, str]:
    """A drawing without its media query, and with what is in it."""
    found = _DARK.search(svg)
    dark = found[1] if found is not None else ""
    light = _DARK.sub("", svg)
    return light, light.replace("</style>", f"{dark}\n  </style>", 1)


def rewrite(markdown: str, source: str, drawings: set[str]) -> str:
    """The text of a page for the site.

    Args:
        markdown: as it is in the repository.
        source: its path below the root.
        drawings: names of drawings below docs/ that there are two of.
    """

    def replace(match: re.Match[str]) -> str:
        bang, text, link = match.groups()
        if not _LOCAL.match(link):
            return match[0]
        file, hash_mark, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if bang:
            return _picture(text, link, target, drawings)
        if target in OWN_PAGES:
            depth = source.count("/") - 1
            return f"[{text}]({'../' * max(depth, 0)}{OWN_PAGES[target]}{hash_mark}{anchor})"
        if (ROOT / target / "README.md").exists():
            target += "/README.md"
        if target.startswith("docs/"):
            here = posixpath.dirname(source) if source.startswith("docs/") else "docs"
            return f"[{text}]({posixpath.relpath(target, here)}{hash_mark}{anchor})"
        if " " in text:
            return f"{text} (`{target}`)"
        return text if text.startswith("`") else f"`{text}`"  # a name says where it is

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def _picture(text: str, link: str, target: str, drawings: set[str]) -> str:
    name = target.removeprefix("docs/")
    if name not in drawings:
        return f"![{text}]({link})"
    stem, dot, end = link.rpartition(".")
    return (
        f"![{text}]({stem}-light{dot}{end}#only-light)\n![{text}]({stem}-dark{dot}{end}#only-dark)"
    )


def _drawings() -> dict[str, tuple[bytes, bytes]]:
    """Pictures that there are two of: name below docs/, the light one, the dark one."""
    found = {}
    docs = ROOT / "docs"
    for path in sorted((docs / "images").glob("*.svg")):
        light, dark = light_and_dark(path.read_text(encoding="utf-8"))
        found[f"images/{path.name}"] = light.encode(), dark.encode()
    for path in sorted((docs / "images").glob("*-dark.png")):
        light_path = path.with_name(path.name.replace("-dark", ""))
        found[f"images/{light_path.name}"] = light_path.read_bytes(), path.read_bytes()
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the navigation, behind their page."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))

    def fill(entries: list[Any]) -> None:
        for entry in entries:
            for title, below in entry.items() if isinstance(entry, dict) else ():
                if title == "Decisions":
                    entry[title] = ["adr/README.md", *(f"adr/{name}" for name in decisions)]
                elif isinstance(below, list):
                    fill(below)

    fill(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and both forms of each drawing."""
    for source, name in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for name, both in _drawings().items():
        stem, dot, end = name.rpartition(".")
        for form, content in zip(("light", "dark"), both, strict=True):
            made = f"{stem}-{form}{dot}{end}"
            old = files.get_file_from_path(made)
            if old is not None:
                files.remove(old)
            files.append(File.generated(config, made, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Let links lead to pages of the site, and pictures follow its colours."""
    name = page.file.src_uri
    sources = {made: source for source, made in ROOT_PAGES.items()}
    return rewrite(markdown, sources.get(name, f"docs/{name}"), set(_drawings()))
