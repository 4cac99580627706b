"""The documentation site builds, is complete, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]


def load_hook():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOK = load_hook()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it: every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


class Tags(HTMLParser):
    """What a page loads, and the headings and pictures that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.pictures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source"):
            self.loads.append(given.get("src", ""))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.append(given.get("href", ""))
        if tag == "img":
            self.pictures.append(given["src"])


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for source in Tags(page.read_text()).loads:
            assert not re.match(r"(https?:)?//", source), (page.name, source)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style.name


def test_every_document_is_a_page(site):
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix(".html")
        if name.name == "README.html":
            name = name.with_name("index.html")
        assert (site / name).exists(), name
    for name in ("changelog.html", "contributing.html"):
        assert (site / name).exists()


def test_pictures_are_there_in_light_and_dark(site):
    for page in site.rglob("*.html"):
        shown = [source for source in Tags(page.read_text()).pictures if "#only-" in source]
        for source in shown:
            name, _, form = source.partition("#only-")
            assert form in Path(name).stem
            assert (page.parent / name).resolve().exists(), (page.name, name)
        assert len([s for s in shown if s.endswith("light")]) * 2 == len(shown), page.name


def test_a_drawing_has_the_colours_of_its_form():
    for path in (ROOT / "docs" / "images").glob("*.svg"):
        text = path.read_text()
        light, dark = HOOK.light_and_dark(text)
        assert "prefers-color-scheme" in text
        assert "prefers-color-scheme" not in light + dark
        assert light != dark
        assert "viewBox" in light
        for form in (light, dark):
            ElementTree.fromstring(form)


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("docs/a.md", "[x](b.md#c)", "[x](b.md#c)"),
        ("docs/a.md", "[x](../CHANGELOG.md)", "[x](changelog.md)"),
        ("docs/adr/a.md", "[x](../../SECURITY.md)", "[x](../security.md)"),
        ("docs/a.md", "[`x`](../src/kvkeep/hashing.py)", "`x`"),
        ("docs/a.md", "[test_x](../tests/test_a.py)", "`test_x`"),
        ("docs/a.md", "[the code](../src/kvkeep/hashing.py)", "the code (`src/kvkeep/hashing.py`)"),
        ("CONTRIBUTING.md", "[x](docs/faults.md)", "[x](faults.md)"),
        ("CONTRIBUTING.md", "[x](docs/adr/)", "[x](adr/README.md)"),
        ("docs/a.md", "[x](https://example.org)", "[x](https://example.org)"),
        ("docs/a.md", "```\n[x](../y)\n```", "```\n[x](../y)\n```"),
        (
            "docs/a.md",
            "![x](images/y.svg)",
            "![x](images/y-light.svg#only-light)\n![x](images/y-dark.svg#only-dark)",
        ),
    ],
)
def test_links_for_the_site(source, text, expected):
    assert HOOK.rewrite(text, source, {"images/y.svg"}) == expected
