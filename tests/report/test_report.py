"""`qfleet report`: what the page holds, how it is found, and what is refused. How it looks, a browser says."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys

import pytest
from report_kit import EVIL, records, write_run

from qfleet.cli.commands import main
from qfleet.report import run_report as reporting
from qfleet.report.run_report import gather, report
from qfleet.report.webpage import list_videos


def data_of(path):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    return json.loads(found[1])


@pytest.fixture
def runs(tmp_path):
    made = [write_run(tmp_path, f"double-s{seed}", seed) for seed in (1, 2, 3)]
    return made + [write_run(tmp_path, f"single-s{seed}", seed, gain=0.5, double=False) for seed in (1, 2)]


def test_the_page_lies_in_the_run_and_needs_nothing_else(tmp_path, monkeypatch, capsys):
    for missing in ("matplotlib", "imageio_ffmpeg", "PIL"):
        monkeypatch.setitem(sys.modules, missing, None)
    run = write_run(tmp_path, "alone")
    assert main(["report", "alone", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", text) and "@import" not in text
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "run.json"]


def test_json_names_the_page(runs, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", *map(str, runs), "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(out) and len(told["runs"]) == 5 and told["bytes"] == out.stat().st_size


def test_seeds_are_grouped_and_scored(runs):
    data, _ = gather(runs)
    assert [group["label"] for group in data["groups"]] == ["double (3 seeds)", "single (2 seeds)"]
    assert [run["group"] for run in data["runs"]] == [0, 0, 0, 1, 1] and data["title"] == "ALE/Pong-v5"
    double, single = data["scores"]
    assert double["finals"] == [25, 26, 27] and double["score"] == 26 and double["seeds"] == 3
    assert double["score_low"] == 25 and double["score_high"] == 27 and single["score"] == 13.5
    assert double["human"] == pytest.approx((26 + 20.7) / 35.3)
    assert gather(runs)[0]["scores"] == data["scores"], "the same runs have the same interval"


def test_games_of_one_agent_are_scored_together(tmp_path):
    runs = [write_run(tmp_path, f"{game}-s{seed}", seed, env=f"ALE/{game}-v5") for game in ("Pong", "Breakout")
            for seed in (1, 2)]
    rows = gather(runs)[0]["scores"]
    assert [row["label"] for row in rows] == ["Breakout (2 seeds)", "Pong (2 seeds)", "all 2 games"]
    assert rows[-1]["seeds"] == 4 and rows[-1]["human_low"] <= rows[-1]["human"] <= rows[-1]["human_high"]
    assert "score" not in rows[-1], "points of different games have no mean"


def test_one_seed_has_no_interval_and_no_evaluation_no_score(tmp_path):
    one = write_run(tmp_path, "one", env="CartPole-v1")
    [row] = gather([one])[0]["scores"]
    assert row["score"] == 25 and row["score_low"] is None and "human" not in row
    plain = [row for row in records(1) if "eval/mean_reward" not in row]
    data, _ = gather([write_run(tmp_path, "none", rows=plain)])
    assert data["scores"] == [] and data["runs"][0]["final"] is None


def test_what_differs_between_configurations_is_marked(runs):
    rows = {row["key"]: row for row in gather(runs)[0]["config"]}
    assert [key for key, row in rows.items() if row["differs"]] == ["agent.double"]
    assert rows["agent.double"]["values"] == ["true", "false"] and rows["seed"]["values"] == ["1, 2, 3", "1, 2"]
    assert rows["env.kwargs.title"]["values"] == [EVIL, EVIL] and rows["run.name"]["incidental"]


def test_how_it_was_made_is_told(runs):
    [attempt] = gather(runs[:1])[0]["runs"][0]["attempts"]
    assert attempt["command"] == "qfleet train pong run.name=double-s1" and attempt["memory"] == "8.0 GB"
    assert attempt["git state"] == "changed since the commit" and attempt["gpu"] == "none"
    assert attempt["qfleet"] == "0.1.0" and attempt["git commit"] == "c0ffee"


@pytest.mark.parametrize("text", ["", "[]", '{"attempts": 3}', '{"attempts": [1, {"hardware": 7, "versions": []}]}'])
def test_a_damaged_record_of_a_run_is_no_obstacle(tmp_path, text):
    run = write_run(tmp_path, "x")
    (run / "run.json").write_text(text)
    assert len(gather([run])[0]["runs"][0]["attempts"]) <= 1


def test_what_users_name_is_data_and_never_markup(tmp_path):
    run = write_run(tmp_path, "x", env=EVIL)
    text = report([run]).read_text()
    assert "<img" not in text and "onerror" in text
    assert data_of(run / "report.html")["runs"][0]["env"] == EVIL
    assert re.search(r"<title>([^\n]*)</title>", text)[1].startswith("&lt;/script&gt;&lt;img")


def test_only_the_scripts_of_the_page_may_run(tmp_path):
    text = report([write_run(tmp_path, "x")]).read_text()
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert f"script-src 'sha256-{digest}';" in policy and policy.startswith("default-src 'none'")


def test_films_are_put_in_newest_first_and_not_beyond_reason(tmp_path, monkeypatch):
    import os

    run = write_run(tmp_path, "x")
    (run / "videos").mkdir()
    for age, name in enumerate(["step-3.mp4", "step-2.mp4", "step-1.mp4"]):
        (run / "videos" / name).write_bytes(name.encode() * 10)
        os.utime(run / "videos" / name, (1000 - age, 1000 - age))
    (run / "videos" / ".step-4.partial-7.mp4").write_bytes(b"half")
    (run / "videos" / "best.gif").write_bytes(b"GIF89a")
    data, reels = gather([run], 2)
    assert [film["name"] for film in data["runs"][0]["films"]] == ["step-3.mp4", "step-2.mp4"]
    assert base64.b64decode(reels[1]) == b"step-2.mp4" * 10
    assert gather([run], 0)[1] == []
    monkeypatch.setattr(reporting, "MAX_VIDEO_BYTES", 150)
    assert len(gather([run], 3)[1]) == 1


def test_a_run_named_twice_counts_once(runs):
    assert len(gather([runs[0], runs[0].parent / "." / runs[0].name])[0]["runs"]) == 1


def test_figures_that_are_not_finite_become_null(tmp_path):
    run = write_run(tmp_path, "x", rows=[{"step": 1, "time_s": 1.0, "train/loss": None, "train/q_mean": 1.0}])
    (run / "metrics.jsonl").open("a").write('{"step": 2, "time_s": 2.0, "train/loss": NaN, "train/q_mean": Infinity}\n')
    series = data_of(report([run]))["runs"][0]["series"]
    assert series["y"]["train/q_mean"] == [1, None]


@pytest.mark.parametrize(("words", "told"), [
    (["report", "gone"], "no run 'gone'"), (["report"], "RUN is missing"),
    (["report", "x", "-o", "page.pdf"], "must end in .html"), (["report", "x", "--videos", "-1"], "too small"),
    (["report", "empty"], "has no metric records yet"), (["report", "x", "-o", "file/page.html"], "cannot write")])
def test_mistakes_are_told(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", "x")
    (write_run(tmp_path / "runs", "empty") / "metrics.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert told in err and out == "" and "Traceback" not in err


def test_films_are_files_of_the_run_itself(tmp_path):
    """A run of somebody else's could link to what this user may read, or hold a folder where a film should be."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    videos = tmp_path / "videos"
    (videos / "folder.mp4").mkdir(parents=True)
    (videos / "link.mp4").symlink_to(secret)
    for age, name in enumerate(["new.mp4", "old.mp4", ".half.mp4"]):
        (videos / name).write_bytes(b"film")
        os.utime(videos / name, (1000 - age, 1000 - age))
    assert [path.name for path in list_videos(videos)] == ["new.mp4", "old.mp4"]


def test_a_folder_of_films_that_is_a_link_is_not_embedded(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "home.mp4").write_bytes(b"secret")
    run = write_run(tmp_path, "sent")
    (run / "videos").symlink_to(private)
    text = report([run]).read_text()
    assert "home.mp4" not in text and base64.b64encode(b"secret").decode() not in text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_run_that_links_to_a_file_elsewhere_is_refused(tmp_path, name, capsys):
    """What the page shows of a run from elsewhere is often sent back to where it came from."""
    run, private = write_run(tmp_path, "sent"), tmp_path / "private"
    (run / name).rename(private)
    (run / name).symlink_to(private)
    for verb in ("report", "plot", "doctor"):
        assert main([verb, str(run)]) == 2
        err = capsys.readouterr().err
        assert f"{name}: cannot be read (it is a link" in err and "a copy of the file" in err, err


def test_a_record_of_starts_that_is_a_link_is_not_shown(tmp_path):
    run, private = write_run(tmp_path, "sent"), tmp_path / "private"
    (run / "run.json").rename(private)
    (run / "run.json").symlink_to(private)
    assert data_of(report([run]))["runs"][0]["attempts"] == []
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    assert data_of(report([run]))["runs"][0]["attempts"] == [], "a pipe is not waited for"


def test_a_page_is_not_written_through_a_link_that_waits_for_it(tmp_path):
    run, private = write_run(tmp_path, "sent"), tmp_path / "private"
    private.write_text("mine")
    for number in range(os.getpid() - 3, os.getpid() + 4):
        (run / f".report.partial-{number}.html").symlink_to(private)
    report([run])
    assert private.read_text() == "mine"


def test_what_is_no_number_is_no_figure(tmp_path):
    odd = [{"step": 13_000, "time_s": "soon", "train/loss": "high", "eval/mean_reward": "great", "time/fps": [3],
            "rollout/ep_rew_mean": {"a": 1}, "train/q_mean": True, "updates": None},
           {"step": 14_000, "time_s": 44.0, "train/loss": 0.5, "replay/size": None}]
    run = write_run(tmp_path, "odd", rows=[*records(1), *odd])
    page = data_of(report([run]))
    series = page["runs"][0]["series"]
    assert series["x"]["steps"][-2:] == [13_000, 14_000] and series["y"]["train/loss"][-2:] == [None, 0.5]
    assert page["runs"][0]["evaluations"] == 4 and page["runs"][0]["time_s"] == 44
    assert main(["plot", str(run), "--y", "train/loss"]) == 0 and main(["doctor", str(run)]) == 0
