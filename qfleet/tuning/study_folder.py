"""Directory of a study: its settings, Optuna's journal, the runs of the trials, and the results.

    STUDY/  study.yaml  base.yaml  journal.log  trial-000/  trial-001/  ...  logs/
            best.yaml  trials.csv  history.png  parameters.png  lock
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from qfleet.config import DEFAULT, Config, flatten, parse_mapping, read_yaml, to_yaml, validate
from qfleet.config.strict_yaml import dump_yaml
from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import Resolved
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runs.find import refuse_imports
from qfleet.runs.trust import fingerprint, owned
from qfleet.tuning.space import nested
from qfleet.tuning.study_settings import StudySettings, make_pruner, make_sampler

STUDY_NAME = "qfleet"
"""Name of the study in Optuna's journal."""


class StudyFile(Config):
    """Content of study.yaml."""

    settings: StudySettings
    space: dict[str, Any] | None
    """Parameters by key; None if the space is a function."""
    source: str
    """What was tuned, for the description of the best recipe."""
    evaluations: int
    """Evaluations of a whole run."""
    home: str | None = None
    """Fingerprint of the study's directory, which a copy does not have."""


@dataclass(frozen=True)
class StudyFolder:
    """A study on disk."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "study.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / "journal.log"

    @property
    def best(self) -> Path:
        return self.path / "best.yaml"

    @staticmethod
    def create(path: Path, file: StudyFile, base: Resolved) -> StudyFolder:
        """Create a study; UserError if there is one already."""
        if (path / "study.yaml").exists():
            raise UserError(f"the study {path} exists already: continue it with `qfleet tune --resume {path}` (in "
                            "Python resume=True), or choose another directory with --study (study=...)")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists already and is not a study: choose another directory with --study")
        try:
            path.mkdir(parents=True, exist_ok=True)
            replace_text(path / "base.yaml", "# Config shared by all trials.\n" + dump_yaml(recipe_of(base)))
            StudyFolder(path).write(file.model_copy(update={"home": fingerprint(path)}))
        except OSError as error:
            raise UserError(f"cannot write the study {path}: {error.strerror}; choose another directory with "
                            "--study") from error
        return StudyFolder(path)

    @staticmethod
    def open(path: Path) -> StudyFolder:
        """Find an existing study."""
        if not (path / "study.yaml").is_file():
            raise UserError(f"{path} is not a study: a study is a directory with study.yaml, made by `qfleet tune`")
        return StudyFolder(path)

    def file(self) -> StudyFile:
        return validate(StudyFile, read_yaml(self.settings), str(self.settings))

    def base(self) -> dict[str, Any]:
        return read_yaml(self.path / "base.yaml")

    def write(self, file: StudyFile) -> None:
        """Write study.yaml."""
        replace_text(self.settings, dump_yaml(file.model_dump(mode="json")))

    def require_trusted(self) -> None:
        """Refuse a foreign study that names code. Call it before validating its config, which imports that code."""
        file = self.file()
        if not (owned(self.path, self.settings) and file.home == fingerprint(self.path)):
            refuse_imports(self.base() | {"space": file.space}, f"study {self.path}",
                           "it was not created here by you (it may be a copy)")

    def lock(self) -> None:
        """Become the only process that works on the study."""
        try:
            RunDirectory(self.path).lock()
        except UserError as error:
            raise UserError(str(error).replace("another run writes here", "another process works on this study")
                            .replace("choose another run.name", "choose another directory with --study")) from None

    def unlock(self) -> None:
        RunDirectory(self.path).unlock()

    def optuna_study(self, settings: StudySettings, jobs: int, evaluations: int) -> Any:
        """Optuna's study, from the journal if there is one."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        journal = self.journal.resolve()
        Path(f"{journal}.lock").unlink(missing_ok=True)  # of a study that was killed: this process has the study's lock
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = JournalStorage(JournalFileBackend(str(journal)))
            created = optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize",
                                          load_if_exists=True)
            sampler = make_sampler(settings, jobs, len(created.get_trials(deepcopy=False)))
            pruner = make_pruner(settings, evaluations * settings.seeds_per_trial)
            return optuna.load_study(storage=storage, study_name=STUDY_NAME, sampler=sampler, pruner=pruner)

    def write_best(self, resolved: Resolved, file: StudyFile, header: str) -> None:
        """Write the settings of the best trial as a recipe."""
        replace_text(self.best, best_recipe(resolved, file, header))


def recipe_of(resolved: Resolved) -> dict[str, Any]:
    """Recipe of a config: all keys that have an effect and whose values do not come from the defaults."""
    effective = parse_mapping(to_yaml(resolved.config), "config")
    found: dict[str, Any] = {}
    for key in flatten(resolved.config):
        value: Any = effective
        for part in key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and resolved.provenance.get(key, DEFAULT) != DEFAULT:
            found[key] = value
    return nested(found)


_ABSENT = object()


def best_recipe(resolved: Resolved, file: StudyFile, header: str) -> str:
    """Text of the recipe file, without the place of the trial's run."""
    data = recipe_of(resolved)
    for key in ("root", "name"):
        data.get("run", {}).pop(key, None)
    data = {name: value for name, value in data.items() if value != {}}
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    made = f"{datetime.now():%Y-%m-%d}"
    return comment + dump_yaml({"description": f"{file.source}, tuned on {made}"} | data)
