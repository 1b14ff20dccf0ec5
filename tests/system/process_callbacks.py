"""Callbacks for runs whose learner is another process: they write what they are told into the run's folder."""

from __future__ import annotations

import json
import os

import qfleet


class Diary(qfleet.Callback):
    """Asks for an evaluation and a checkpoint after 300 steps, and stops the run once both are there."""

    def __init__(self):
        self.events, self.asked, self.episodes = [], False, 0

    def note(self, run, *words):
        with (run.directory / "diary.jsonl").open("a") as file:
            file.write(json.dumps([os.getpid(), *words]) + "\n")

    def on_start(self, run):
        self.note(run, "start")

    def on_step(self, run):
        run.log({"callback/steps": run.steps})
        if run.steps >= 300 and run.updates > 20 and not self.asked:
            self.asked = True
            run.request_evaluation()
            run.request_checkpoint()

    def on_episode(self, run, episode):
        self.episodes += 1
        self.note(run, "episode", episode.reward, episode.length, episode.actor)

    def on_evaluation(self, run, evaluation):
        self.note(run, "evaluation", evaluation.mean_reward, evaluation.updates)
        self.events.append("evaluation")
        self.stop_when_complete(run)

    def on_checkpoint(self, run, checkpoint):
        self.note(run, "checkpoint", checkpoint.step, checkpoint.path.name)
        self.events.append("checkpoint")
        self.stop_when_complete(run)

    def stop_when_complete(self, run):
        if {"evaluation", "checkpoint"} <= set(self.events) and self.episodes:
            run.stop()

    def on_end(self, run, reason):
        self.note(run, "end", reason)


class Insatiable:
    """Asks for the next evaluation whenever a score arrives, and for the first one when the learner learns."""

    def __init__(self):
        self.asked, self.scored = False, []

    def on_step(self, run):
        if run.updates > 20 and not self.asked:
            self.asked = True
            run.request_evaluation()

    def on_evaluation(self, run, evaluation):
        self.scored.append(evaluation.updates)
        run.request_evaluation()

    def on_end(self, run, reason):
        (run.directory / "scored.json").write_text(json.dumps(self.scored))


class Broken:
    """Fails once the learner learns."""

    def on_step(self, run):
        if run.updates > 20:
            raise ValueError("out of luck")
