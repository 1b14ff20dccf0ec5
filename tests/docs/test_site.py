"""The documentation as a site: it is built without a warning, and every link in what was built leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Page(HTMLParser):
    """The anchors of a page, and where it points to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def broken(site: Path) -> list[str]:
    """Links to files or anchors that are not there; what is loaded from elsewhere counts, too."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and target in pages
                                       and unquote(parts.fragment) not in pages[target].anchors):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def documents() -> list[str]:
    """Every page below docs/, decisions included, without its ending."""
    return [str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "docs").rglob("*.md")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                          capture_output=True, text=True, timeout=150, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site):
    assert {path.parent for path in site.glob("docs/**/index.html")} == {site / page for page in documents()}
    assert "deep Q-learning" in (site / "index.html").read_text()


def test_every_link_leads_somewhere(site):
    assert broken(site) == []


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://", path.read_text()), path


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text()
    assert [page for page in documents() if f"{page}/" not in home] == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="#x"></a><a href="b.html#y"></a><a href="#gone"></a>'
                                     '<img src="gone.png"><a href="https://example.org/"></a>')
    (tmp_path / "b.html").write_text('<h1 id="y"></h1><a href="a.html#x"></a><a href="a.html#y"></a>')
    assert sorted(broken(tmp_path)) == ["a.html: #gone", "a.html: gone.png", "b.html: a.html#y"]
