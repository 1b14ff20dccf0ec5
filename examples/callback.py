"""A callback that logs the success rate of the last episodes and stops the run once that is high.

    python callback.py                    # 4 to 8 seconds
"""

from collections import deque

import qfleet


class StopOnSuccess(qfleet.Callback):
    """Logs `success/rate` and stops the run when it reaches `threshold`."""

    def __init__(self, threshold: float = 0.8, episodes: int = 100) -> None:
        self.threshold = threshold
        self.recent: deque[bool] = deque(maxlen=episodes)

    def on_episode(self, run: qfleet.RunControl, episode: qfleet.Episode) -> None:
        self.recent.append(episode.reward > 0)  # the paddle caught the ball
        rate = sum(self.recent) / len(self.recent)
        run.log({"success/rate": rate})  # to metrics.jsonl and TensorBoard
        if len(self.recent) == self.recent.maxlen and rate >= self.threshold:
            run.stop()

    def on_end(self, run: qfleet.RunControl, reason: str) -> None:
        print(f"{reason} after {run.steps:,} steps and {run.episodes} episodes")


if __name__ == "__main__":
    result = qfleet.train("catch", total_steps=30_000, stop_at=None, callbacks=[StopOnSuccess()])
    print(qfleet.evaluate(result.directory, which="latest").mean_reward)
