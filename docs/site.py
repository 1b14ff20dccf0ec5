"""Hook of mkdocs: builds the site from a copy of the repository, so that links between its files hold.

Pages may contain marks such as `<!-- generated: keys -->`, which `generated_tables.py` replaces by tables.
"""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ["*.md", "LICENSE", "docs/*.md", "docs/decisions/*.md", "docs/api/*.md", "docs/assets/*", "examples/**/*.*",
         "benchmarks/*.py", "benchmarks/*.yaml", "benchmarks/results/**/*.*", "qfleet/**/*.py", "qfleet/recipes/*.yaml"]


def on_config(config):
    stage = Path(tempfile.mkdtemp(prefix="qfleet-site-"))
    for path in {path for part in PARTS for path in ROOT.glob(part) if "__pycache__" not in path.parts}:
        target = stage / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    atexit.register(shutil.rmtree, stage, ignore_errors=True)
    config.docs_dir = str(stage)
    return config


def on_page_markdown(markdown, page, config, files):
    if "<!-- generated: " not in markdown:
        return markdown
    for folder in (ROOT / "docs", ROOT):  # the sources next to this file, not an installed qfleet
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import generated_tables

    return generated_tables.fill(markdown)
