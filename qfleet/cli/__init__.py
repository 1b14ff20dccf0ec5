"""What every verb of the command line does: call the library, then tell the result to people or as JSON.

A verb takes parsed arguments and returns an exit code. The library is imported inside the verbs, so that `qfleet
--help` is instant and works without torch.
"""

from qfleet.cli.hub import share
from qfleet.cli.info import check_env, config, doctor, env_host, recipes, version
from qfleet.cli.join import join, run_member
from qfleet.cli.pages import report, watch
from qfleet.cli.play import evaluate, export, play, plot, record
from qfleet.cli.submit import submit
from qfleet.cli.top import top
from qfleet.cli.train import resume, train

__all__ = [
           "check_env",
           "config",
           "doctor",
           "env_host",
           "evaluate",
           "export",
           "join",
           "play",
           "plot",
           "recipes",
           "record",
           "report",
           "resume",
           "run_member",
           "share",
           "submit",
           "top",
           "train",
           "version",
           "watch",
]
