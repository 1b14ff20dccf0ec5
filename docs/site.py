"""A hook of mkdocs: the site is made of the repository as it lies, so that every link between its files holds."""

import atexit
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ["*.md", "LICENSE", "docs/*.md", "docs/*/*.md", "docs/assets/*", "examples/**/*.*",
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
