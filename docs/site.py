"""mkdocs hooks: the site is built from the repository's files as they are, and code and tables get readable HTML."""

import atexit
import html
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ["*.md", "CITATION.cff", "Dockerfile", "LICENSE", "docs/*.md", "docs/*/*.md", "docs/assets/*",
         "examples/**/*.*", "benchmarks/*.json", "benchmarks/*.py", "benchmarks/*.yaml", "benchmarks/results/**/*.*",
         "qfleet/**/*.py", "qfleet/recipes/*.yaml"]
LONG_CELL = 40
"""Characters of a table cell above which its column keeps a minimum width: the table scrolls instead."""

BLOCK = re.compile(r'<div class="highlight">(<pre>.*?</pre>)</div>', re.S)
CELL = re.compile(r'<td( style="[^"]*")?>(.*?)</td>', re.S)
CODE = re.compile(r"<code>([^<]*)</code>")
WORD = re.compile(r"\S+")
PROMPT = re.compile(r"^(<pre>(?:<span></span>)?<code>)?\$ ", re.M)


def on_config(config):
    stage = Path(tempfile.mkdtemp(prefix="qfleet-site-"))
    for path in {path for part in PARTS for path in ROOT.glob(part) if "__pycache__" not in path.parts}:
        target = stage / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    atexit.register(shutil.rmtree, stage, ignore_errors=True)
    config.docs_dir = str(stage)
    return config


def on_page_content(content, page, **_):
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # which would list this page only
    return CELL.sub(with_whole_words, BLOCK.sub(with_copied_text, content))


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def commands(text: str) -> str:
    """The commands of a console session: no prompts, no output, no comments at the end of a line."""
    found, continued = [], False
    for line in text.splitlines():
        if continued or line.startswith("$ "):
            command = re.sub(r"(^|\s+)# .*", "", line if continued else line[2:]).rstrip()
            found += [command] if command else []
            continued = command.endswith("\\")
    return "\n".join(found)


def with_copied_text(block: re.Match[str]) -> str:
    """A console block whose copy button copies its commands; `data-copy` is read by the theme."""
    text = plain(block[1])
    if not text.startswith("$ "):
        return block[0]
    marked = PROMPT.sub(lambda found: f'{found[1] or ""}<span class="gp">$ </span>', block[1])
    return f'<div class="highlight" data-copy="{html.escape(commands(text))}">{marked}</div>'


def with_whole_words(cell: re.Match[str]) -> str:
    """A table cell whose code breaks only at spaces. Long cells get a class, by which they keep a minimum width."""
    long = ' class="long"' if len(plain(cell[2])) > LONG_CELL else ""
    inner = CODE.sub(lambda code: f"<code>{WORD.sub(lambda word: f'<span>{word[0]}</span>', code[1])}</code>", cell[2])
    return f"<td{cell[1] or ''}{long}>{inner}</td>"
