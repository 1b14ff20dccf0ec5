"""Messages between the processes of a run: gRPC with typed messages, within a host and between hosts."""

import os

# gRPC's core writes a line to stderr for every failed connection to the port; errors that matter are raised or logged.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
