"""Main function of an evaluator process: evaluates weights of the learner or coordinator and sends the scores."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import torch

from qfleet.accel.threads import evaluator_threads
from qfleet.core.evaluation import Score
from qfleet.launch.endpoint import Endpoint
from qfleet.launch.fleet_client import FleetClient
from qfleet.report.eval_video import EvalVideoRecorder
from qfleet.runconfig.build import make_eval_env
from qfleet.runs.checkpoint_parts import pack_state
from qfleet.training.evaluation import Evaluator, EvaluatorHooks
from qfleet.transport.client import FleetConnection

POLL_S = 0.1


def run_evaluator(endpoint: Endpoint, videos: Path | None = None) -> int:
    """Main function of an evaluator: evaluate the newest weights when due and the final ones, and record videos."""
    client = FleetClient(endpoint, "evaluator")
    config, connection = client.config, client.connection
    if not config.has_driver:
        torch.set_num_threads(evaluator_threads(config.device.startswith("cuda")))
    recorder = None if videos is None else EvalVideoRecorder(config, videos)

    def on_evaluation(score: Score, weights: dict[str, torch.Tensor]) -> None:
        if recorder is not None:  # before the score is sent: after the last one the run does not wait for a video
            recorder.record(evaluator.policy, evaluator.count - 1, connection.progress().steps, client.is_over)
        connection.send_evaluation(score, weights)
        if evaluator.bandit is not None:
            connection.metrics.set_member_state(pack_state(evaluator.bandit.state_dict()))

    with client.deregister_on_error(), closing(make_eval_env(config)) as env:
        client.require_spec(env.spec)
        evaluator = Evaluator(client.policy("evaluator"), env, connection.weights, config.eval, config.seed,
                              EvaluatorHooks(connection.progress, on_evaluation, client.is_over))
        if evaluator.bandit is not None:
            client.restore_state(evaluator.bandit.load_state_dict)
        connection.start()
        evaluator.resume()
        if client.incarnation > 1:
            evaluator.request()
        on_publish = config.learners_act and not config.has_server
        worker = EvaluateOnPublish(evaluator) if on_publish else evaluator
        return client.run(RequestedEvaluation(connection, evaluator), worker)


class EvaluateOnPublish:
    """Evaluates every version it receives; the learner publishes only versions that are due."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._polled_at = -POLL_S

    def step(self) -> bool:
        if time.monotonic() - self._polled_at < POLL_S:
            return False
        before = self.evaluator.evaluated_version
        self.evaluator.evaluate()
        self._polled_at = time.monotonic()
        return self.evaluator.evaluated_version != before


class RequestedEvaluation:
    """Evaluates the version that the learner asks for, or a newer one: at the end of the run, or for a callback.

    A resumed learner has other weights under the same version numbers, and has received no evaluation of them.
    """

    def __init__(self, connection: FleetConnection, evaluator: Evaluator) -> None:
        self.connection, self.evaluator = connection, evaluator
        self.epoch = connection.welcome.epoch

    def step(self) -> bool:
        if self.epoch != self.connection.welcome.epoch:
            self.epoch = self.connection.welcome.epoch
            self.evaluator.restart()
        if self.evaluator.evaluated_version >= self.connection.wanted_version:
            return False
        self.evaluator.evaluate()
        return True
