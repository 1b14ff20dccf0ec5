"""The golden comparison can fail: small stored results that differ in one place, and trees that train nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import goldens
import numpy as np
import pytest
import torch
from golden_results import Incomplete, Names, Rule, differences, read_arrays, read_result
from safetensors.numpy import save_file

from qfleet.runconfig import resolution
from qfleet.runs.checkpoint import open_checkpoint

POLICY = {"head.q.weight": np.array([[0.5, -0.25]], np.float32), "head.q.bias": np.array([0.0, math.nan], np.float32)}
STATE = {"0:learner/gradients/mean": np.array([1e-3, 2e-3, 3e-3], np.float32),
         "1:replay/leaves": np.array([1.0, 2.0])}
DOCUMENT = {
    "learner": {"net": {name: {"$tensor": f"policy:{name}"} for name in POLICY},
                "gradients": {"mean": {"$tensor": "0:learner/gradients/mean"}}, "updates": 60},
    "replay": {"leaves": {"$array": "1:replay/leaves"}, "largest": {"$float": "inf"}},
    "actors": [{"counts": {"$items": [[3, {"$scalar": "1:replay/leaves"}]]}, "pair": {"$tuple": [1, 2]}}]}
RECORDS = [{"step": 100, "updates": 20, "time_s": 0.1, "time/fps": 900.0, "train/loss": 0.1},
           {"step": 200, "updates": 60, "time_s": 0.3, "train/update_ms": 1.5, "train/loss": 0.2, "replay/bytes": 7.0},
           {"step": 200, "updates": 60, "time_s": 0.4, "eval/mean_reward": 9.0, "eval/seconds": 0.1}]
USUAL, SAME = Rule(), Names()


def write(run: Path, policy=POLICY, state=STATE, records=RECORDS, document=DOCUMENT, updates=60) -> Path:
    """A run directory with two checkpoints, of which the first has other weights."""
    for step, weights in ((100, {name: array + 1 for name, array in POLICY.items()}), (200, policy)):
        checkpoint = run / "checkpoints" / f"step-{step:012d}"
        checkpoint.mkdir(parents=True)
        save_file(weights, checkpoint / "policy.safetensors")
        save_file(state, checkpoint / "state.safetensors")
        (checkpoint / "state.json").write_text(json.dumps(document))
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "updates": updates}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def compared(folder: Path, rule=USUAL, tags=SAME, arrays=SAME, **changed) -> list[str]:
    """Differences of two stored results, of which the second has these parts changed and its names translated."""
    base = read_result(write(folder / "base"), SAME, SAME)
    return differences(base, read_result(write(folder / "now", **changed), tags, arrays), rule)


def flipped(array: np.ndarray, bit: int = 0) -> np.ndarray:
    """A copy whose last element has one bit changed, by default the least significant one."""
    data = bytearray(array.tobytes())
    data[len(data) - array.itemsize + bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def with_record(index: int, **values) -> list[dict]:
    changed = [dict(record) for record in RECORDS]
    changed[index] |= values
    return changed


def renamed(records: list[dict], old: str, new: str) -> list[dict]:
    return [{new if tag == old else tag: value for tag, value in record.items()} for record in records]


def test_equal_results_have_no_differences(tmp_path):
    assert compared(tmp_path) == []


def test_a_flipped_bit_of_a_weight_is_found_wherever_the_weight_is_saved(tmp_path):
    found = compared(tmp_path, policy=POLICY | {"head.q.weight": flipped(POLICY["head.q.weight"])})
    assert found == [f"{place}/head.q.weight at step 200: 1 of 2 elements differ, first [0, 1]: -0.25 in BASE, "
                     "-0.2500000298023224 now" for place in ("policy", "learner/net")]


@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_of_the_optimizer_state_is_found(tmp_path, bit):
    name = "0:learner/gradients/mean"
    (found,) = compared(tmp_path, state=STATE | {name: flipped(STATE[name], bit)})
    assert found.startswith("learner/gradients/mean at step 200: 1 of 3 elements differ, first [2]: 0.003")


def test_a_negative_zero_is_not_zero(tmp_path):
    changed = np.array([-0.0, math.nan], np.float32)
    found = compared(tmp_path, policy=POLICY | {"head.q.bias": changed})
    assert len(found) == 2 and found[0].endswith("first [0]: 0.0 in BASE, -0.0 now")


def test_another_type_or_shape_is_found(tmp_path):
    found = compared(tmp_path, state=STATE | {"1:replay/leaves": np.array([1.0, 2.0], np.float32)})
    assert found[0] == "replay/leaves at step 200: F64 [2] in BASE, F32 [2] now"
    found = compared(tmp_path / "shape", state=STATE | {"1:replay/leaves": np.array([[1.0, 2.0]])})
    assert found[0] == "replay/leaves at step 200: F64 [2] in BASE, F64 [1, 2] now"


def test_the_last_digit_of_a_metric_counts_and_the_first_step_is_named(tmp_path):
    records = with_record(0, **{"train/loss": math.nextafter(0.1, 1)})
    records[1]["train/loss"] = 7.0
    assert compared(tmp_path, records=records) == [
        "train/loss at step 100: 0.1 in BASE, 0.10000000000000002 now"]


def test_an_evaluation_of_this_process_counts_and_that_of_another_does_not(tmp_path):
    records = with_record(2, **{"eval/mean_reward": 8.0})
    assert compared(tmp_path, records=records) == ["eval/mean_reward at step 200: 9.0 in BASE, 8.0 now"]
    assert compared(tmp_path / "process", Rule(evaluations=False), records=records) == []


def test_timings_and_memory_do_not_count(tmp_path):
    records = with_record(1, **{"time_s": 99, "train/update_ms": 9.5, "time/fps": 1.0, "replay/bytes": 8.0})
    assert compared(tmp_path, records=records) == []


def test_a_missing_and_an_additional_tag_are_found(tmp_path):
    missing = [{tag: value for tag, value in record.items() if tag != "train/loss"} for record in RECORDS]
    assert compared(tmp_path, records=missing) == ["train/loss at step 100: 0.1 in BASE, missing now"]
    more = with_record(1, **{"train/new": 1.0})
    assert compared(tmp_path / "more", records=more) == ["train/new at step 200: missing in BASE, 1.0 now"]
    assert compared(tmp_path / "listed", tags=Names(left_out=["train/new"]), records=more) == []


def test_a_renamed_tag_is_found_unless_the_table_lists_it(tmp_path):
    records = renamed(RECORDS, "train/loss", "learner/loss")
    assert [line.split()[0] for line in compared(tmp_path, records=records)] == ["train/loss", "learner/loss"]
    table = Names({"learner/loss": "train/loss"})
    assert compared(tmp_path / "listed", tags=table, records=records) == []
    records[1]["learner/loss"] = 7.0
    assert compared(tmp_path / "value", tags=table, records=records) == ["train/loss at step 200: 0.2 in BASE, 7.0 now"]


def test_renamed_state_is_found_unless_the_table_lists_it(tmp_path):
    document = DOCUMENT | {"learner": {"network": DOCUMENT["learner"]["net"], "opt": DOCUMENT["learner"]["gradients"]}}
    found = compared(tmp_path, document=document)
    assert len(found) == 6 and "learner/opt/mean at step 200: only now" in found
    assert "learner/gradients/mean at step 200: only in BASE" in found
    table = Names({"learner/network": "learner/net", "opt": "gradients"})
    assert compared(tmp_path / "listed", arrays=table, document=document) == []


def test_a_rename_applies_to_whole_parts_of_a_place():
    table = Names({"head.q": "value", "net": "network"}, ["actors/*"])
    assert table.place("learner/net/head.q.bias") == "learner/network/value.bias"
    assert table.place("learner/nets/head.quantiles.bias") == "learner/nets/head.quantiles.bias"
    assert table.place("actors/0/obs") is None


def test_a_missing_record_is_found(tmp_path):
    assert compared(tmp_path, records=RECORDS[:2]) == ["metrics.jsonl: 3 records in BASE, 2 now"]


def test_another_number_of_updates_is_found(tmp_path):
    assert compared(tmp_path, updates=61) == [
        "last checkpoint: step 200, 60 updates in BASE, step 200, 61 updates now"]


def test_records_at_steps_that_depend_on_timing_are_compared_by_tags_and_totals(tmp_path):
    rule = Rule(evaluations=False, records=False)
    other = [{"step": 130, "updates": 31, "train/loss": 0.15}, {"step": 200, "updates": 59, "eval/mean_reward": 1.0}]
    assert compared(tmp_path, rule, records=other) == []
    other[-1]["step"] = 201
    assert compared(tmp_path / "total", rule, records=other) == ["step at the end: 200 in BASE, 201 now"]
    found = compared(tmp_path / "tag", rule, records=[{"step": 200, "updates": 60}])
    assert found == ["train/loss at the end: 0.2 in BASE, missing now"]


def test_results_that_show_nothing_are_refused(tmp_path):
    for name, changed, why in (("still", {"policy": {k: a + 1 for k, a in POLICY.items()}}, "weights are the same"),
                               ("short", {"updates": 3}, "3 updates")):
        with pytest.raises(Incomplete, match=why):
            read_result(write(tmp_path / name, **changed), SAME, SAME)
    run = write(tmp_path / "one")
    shutil.rmtree(run / "checkpoints/step-000000000100")
    with pytest.raises(Incomplete, match="1 full checkpoints"):
        read_result(run, SAME, SAME)


def test_arrays_are_read_as_qfleet_reads_them():
    """A stored checkpoint of the current format, by both readers."""
    def leaves(node, place=""):
        if isinstance(node, dict | list | tuple):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from leaves(value, f"{place}/{key}".lstrip("/"))
        elif hasattr(node, "dtype"):
            yield place, node

    folder = sorted((goldens.ROOT / "tests/runs/golden").iterdir())[-1]
    checkpoint = open_checkpoint(folder)
    theirs = dict(leaves({"policy": checkpoint.policy()})) | dict(leaves(checkpoint.state()))
    ours = dict(read_arrays(folder))
    assert len(ours) > 5 and ours.keys() == theirs.keys()
    for place, array in theirs.items():
        data = torch.as_tensor(array).reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data == ours[place].data and tuple(array.shape) == ours[place].shape


# ---- The tables ----

TABLE = goldens.read_table(goldens.HERE / "current.yaml")


def test_both_tables_have_the_same_runs():
    base = goldens.read_table(goldens.HERE / "base.yaml")
    assert TABLE.commands.keys() == base.commands.keys() > goldens.RULES.keys()
    assert re.fullmatch(r"[0-9a-f]{40}\n", (goldens.HERE / "BASE").read_text())


@pytest.mark.parametrize("name", TABLE.commands)
def test_commands_of_the_current_tree_are_valid(name):
    name, *overrides = TABLE.commands[name]
    resolution.resolve(name, overrides)


# ---- The script, with trees that copy a stored result instead of training ----

TRAIN = """
import shutil, sys
from pathlib import Path
here = Path(__file__).parent
settings = dict(word.split("=", 1) for word in sys.argv if "=" in word)
target = Path(settings["run.root"], settings["run.name"])
if target.name in (here / "fails").read_text().split():
    sys.exit("no such key: learner.parts")
shutil.copytree(here / "result", target)
"""
YAML = """
every: [seed=1]
runs: {first: [cartpole], second: [cartpole]}
tags: {renamed: {}, left_out: []}
arrays: {renamed: {}, left_out: []}
"""


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments],
                          check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with one commit, named in BASE, whose qfleet copies its result."""
    root, temporary = tmp_path / "repository", tmp_path / "temporary"
    here = root / "tests/goldens"
    for folder in (temporary, here, root / "qfleet"):
        folder.mkdir(parents=True)
    (root / "qfleet/__init__.py").touch()
    (root / "qfleet/__main__.py").write_text(TRAIN)
    (root / "qfleet/fails").touch()
    write(root / "qfleet/result")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "x")
    (here / "BASE").write_text(git(root, "rev-parse", "HEAD") + "\n")
    for name in ("base", "current"):
        (here / f"{name}.yaml").write_text(YAML)
    monkeypatch.setattr(goldens, "ROOT", root)
    monkeypatch.setattr(goldens, "HERE", here)
    monkeypatch.setattr(goldens.tempfile, "tempdir", str(temporary))
    yield root
    assert len(git(root, "worktree", "list").splitlines()) == 1, "the worktree is removed, however it ends"
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_an_unchanged_tree_is_equal(tree, capsys):
    assert goldens.main([]) == 0
    out = capsys.readouterr().out
    assert "first: equal, 7 arrays after 60 updates, 3 records" in out and "second: equal" in out


@pytest.mark.slow
def test_a_changed_tree_is_different(tree, capsys):
    shutil.rmtree(tree / "qfleet/result")
    write(tree / "qfleet/result", records=with_record(1, **{"train/loss": 0.3}))
    assert goldens.main(["--only", "second"]) == 1
    out = capsys.readouterr().out
    assert "second: DIFFERENT, 1 differences\n    train/loss at step 200: 0.2 in BASE, 0.3 now\n" in out
    assert "first" not in out and "NOT equal to" in out


@pytest.mark.slow
def test_a_training_that_fails_shows_its_output_and_the_others_go_on(tree, capsys):
    (tree / "qfleet/fails").write_text("first")
    assert goldens.main([]) == 1
    out = capsys.readouterr().out
    assert "first: FAILED: the current tree failed with exit code 1\n    | no such key: learner.parts" in out
    assert "second: equal" in out


@pytest.mark.slow
def test_a_training_without_a_result_fails(tree, capsys):
    shutil.rmtree(tree / "qfleet/result/checkpoints")
    assert goldens.main(["--only", "first"]) == 1
    assert "the result of the current tree cannot be compared: 0 full checkpoints" in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_does_not_end_is_ended(tree, capsys, monkeypatch):
    (tree / "qfleet/__main__.py").write_text("import time\ntime.sleep(200)\n")
    monkeypatch.setattr(goldens, "TIMEOUT_S", 3.0)
    assert goldens.main(["--only", "first"]) == 1
    assert "did not end within 3 s" in capsys.readouterr().out


def test_a_commit_that_the_clone_does_not_have_is_named(tree, capsys):
    assert goldens.main(["--base", "0" * 40]) == 2
    assert f"this clone does not have commit {'0' * 40}: fetch the whole history" in capsys.readouterr().err


def test_a_tree_without_git_is_refused(tree, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(goldens, "ROOT", tmp_path)
    assert goldens.main([]) == 2
    assert "not a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert goldens.main([]) == 2
    assert "git is not installed" in capsys.readouterr().err
    monkeypatch.undo()


@pytest.mark.slow
def test_results_are_kept_on_request(tree, capsys):
    assert goldens.main(["--keep", "--only", "first"]) == 0
    folder = Path(re.search(r"results are in (\S+)", capsys.readouterr().out)[1])
    assert (folder / "base/first/metrics.jsonl").exists() and (folder / "current/first.log").exists()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_help_lists_the_runs():
    done = subprocess.run([sys.executable, goldens.__file__, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "two-learners" in done.stdout
