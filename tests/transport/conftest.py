"""gRPC's core reads its verbosity when it is imported; the wire, imported first, has made it quiet by then."""

import qfleet.transport  # noqa: F401
