"""What every verb of the command line does: call the library, then tell the result to people or as JSON.

A verb takes parsed arguments and returns an exit code. The library is imported inside the verbs, so that `qfleet
--help` is instant and works without torch.
"""

from qfleet.verbs.asking import check_env, config, doctor, env_host, recipes, version
from qfleet.verbs.fleet import join, run_member
from qfleet.verbs.pages import report, watch
from qfleet.verbs.sharing import share
from qfleet.verbs.showing import evaluate, export, play, plot, record
from qfleet.verbs.submit import submit
from qfleet.verbs.training import resume, train
from qfleet.verbs.watching import top

__all__ = ["check_env", "config", "doctor", "env_host", "evaluate", "export", "join", "run_member", "play", "plot",
           "recipes", "record", "report", "resume", "share", "submit", "top", "train", "version", "watch"]
