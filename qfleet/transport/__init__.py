"""How the processes of a fleet talk: gRPC with typed messages, the same on one host and between hosts."""

import os

# gRPC's core writes a line to stderr for every stranger who knocks at the port; what matters is raised or logged here.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
