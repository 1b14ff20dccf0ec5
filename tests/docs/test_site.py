"""The documentation as a site: it builds without a warning, its links work, and its pages are readable in a browser."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from chromium_kit import CHROMIUM, Browser

pytest.importorskip("material")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
WIDTHS = (1400, 400)

COLUMNS = 90
"""Code up to this width is shown without scrolling on a wide screen."""

UNREADABLE = """(columns => {
  const found = [], cut = (node, by) => by && node.scrollWidth > node.clientWidth + 1;
  if (document.documentElement.scrollWidth > innerWidth) found.push('the page is wider than the screen');
  for (const shown of document.querySelectorAll('table, pre, pre > code')) {
    const name = `${shown.tagName}: ${shown.innerText.slice(0, 60)}`;
    const wide = node => node.getBoundingClientRect().right > innerWidth + 1;
    for (let node = shown, scrolls = false; node && !scrolls; node = node.parentElement) {
      const overflow = getComputedStyle(node).overflowX;
      if (cut(node, ['hidden', 'clip'].includes(overflow))) { found.push(`cut off: ${name}`); break; }
      if (node === document.body && wide(shown)) found.push(`outside the screen: ${name}`);
      scrolls = ['auto', 'scroll'].includes(overflow) && !wide(node);
    }
    const columnsOf = text => Math.max(...text.split('\\n').map(line => line.length));
    if (shown.tagName === 'CODE' && cut(shown, true) && columnsOf(shown.textContent) <= columns)
      found.push(`scrolls: ${name}`);
  }
  const range = document.createRange();
  for (const code of document.querySelectorAll('td code')) {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (texts.nextNode())
      for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) found.push(`broken: ${word[0]}`);
      }
  }
  return found;
})"""
"""What cannot be read on a page: cut-off tables and code, code that scrolls for no reason, words of table cells on two
lines. What scrolls in its own container is not cut off."""


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
    """Every page below docs/ and every page of the project but README, without its ending."""
    paths = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return [str(path.relative_to(ROOT).with_suffix("")) for path in paths if path != ROOT / "README.md"]


def copied_blocks(text: str) -> list[tuple[str, str]]:
    """(shown text, copied text) of each console block of a page."""
    found = re.findall(r'<div class="highlight"(?: data-copy="([^"]*)")?>(<pre>.*?</pre>)', text, re.S)
    shown = [(html.unescape(re.sub(r"<[^>]+>", "", block)), html.unescape(copied)) for copied, block in found]
    return [(block, copied) for block, copied in shown if block.startswith("$ ")]


def unreadable(browser: Browser, width: int) -> list[str]:
    browser.screen(width, 900)
    return browser.ask(f"{UNREADABLE}({COLUMNS if width >= 1000 else 0})")


@pytest.fixture(scope="module")
def browser():
    with Browser() as each:
        yield each


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                          capture_output=True, text=True, timeout=150, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site):
    built = {path.parent for path in site.rglob("index.html")} - {site, site / "examples"}
    assert built == {site / page for page in documents()}
    assert "deep Q-learning" in (site / "index.html").read_text()


def test_every_link_leads_somewhere(site):
    assert broken(site) == []


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://", path.read_text()), path


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text()
    assert [page for page in documents() if f"{page}/" not in home] == []


def test_a_console_block_copies_its_commands_without_prompts_and_output(site):
    blocks = [block for path in site.rglob("*.html") for block in copied_blocks(path.read_text())]
    assert len(blocks) > 50
    for shown, copied in blocks:
        lines = shown.splitlines()
        assert copied.splitlines()[0] in lines[0], shown
        assert [line for line in copied.splitlines() if line.startswith("$ ") or line not in shown] == []
        assert sum(line.startswith("$ ") and not line.startswith("$ #") for line in lines) == sum(
            not before.endswith("\\") for before in ["", *copied.splitlines()[:-1]])


@in_a_browser
def test_every_page_with_tables_or_code_is_readable_at_both_widths(site, browser):
    found = {}
    for page in sorted(site.rglob("index.html")):
        if not re.search("<table|<pre", page.read_text()):
            continue
        browser.open(page)
        for width in WIDTHS:
            if problems := unreadable(browser, width):
                found[f"{page.relative_to(site)} at {width}"] = problems
        assert browser.complaints == [], page
    assert found == {}


@in_a_browser
def test_the_copy_button_copies_a_command_without_its_prompt(site, browser):
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)  # without focus nothing can be copied
    browser.open(site / "docs/quickstart/index.html")
    browser.sees("document.querySelector('[data-copy] button') !== null")
    browser.ask("document.addEventListener('copy', () => { window.copied = document.activeElement.value }), 0")
    click = "document.querySelector('[data-copy] button').click()"
    browser.call("Runtime.evaluate", expression=click, userGesture=True)
    copied = browser.sees("window.copied")
    assert copied and "$" not in copied
    assert copied == browser.ask("document.querySelector('[data-copy]').dataset.copy")
    browser.ask("getSelection().selectAllChildren(document.querySelector('[data-copy] pre'))")
    assert browser.ask("getSelection().toString()").strip().startswith(copied.splitlines()[0])


@in_a_browser
def test_unreadable_pages_are_found(tmp_path, browser):
    page = tmp_path / "page.html"
    good = ('<div style="overflow: auto"><table><td style="width: 3000px">x</td></table></div><table><td>'
            '<code>two words</code></td></table><pre style="overflow: auto">' + "x" * 500 + "</pre>")
    bad = ('<div style="overflow: hidden"><table><td style="min-width: 3000px">x</td></table></div>'
           '<table><td style="width: 30px; max-width: 30px; overflow-wrap: break-word"><code>long.key</code></td>'
           '</table><pre><code style="display: block; width: 60px; overflow: auto">' + "x" * 80 + "</code></pre>")
    page.write_text(f"<!doctype html>{good}")
    browser.open(page)
    assert unreadable(browser, 1400) == []
    page.write_text(f"<!doctype html>{bad}")
    browser.open(page)
    assert [each.partition(":")[0] for each in unreadable(browser, 1400)] == ["cut off", "scrolls", "broken"]
    page.write_text("<!doctype html><table style='width: 3000px'><td>x</td></table>")
    browser.open(page)
    assert [each.partition(":")[0] for each in unreadable(browser, 1400)] == [
        "the page is wider than the screen", "outside the screen"]


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="#x"></a><a href="b.html#y"></a><a href="#gone"></a>'
                                     '<img src="gone.png"><a href="https://example.org/"></a>')
    (tmp_path / "b.html").write_text('<h1 id="y"></h1><a href="a.html#x"></a><a href="a.html#y"></a>')
    assert sorted(broken(tmp_path)) == ["a.html: #gone", "a.html: gone.png", "b.html: a.html#y"]
