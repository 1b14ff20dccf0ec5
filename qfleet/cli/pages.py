"""Commands that create web pages: `report` on finished or running runs, `watch` on a run in progress."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import TYPE_CHECKING

from qfleet.cli.output import print_result

if TYPE_CHECKING:
    from qfleet.report.live_page import LivePageServer
    from qfleet.runs.directory import RunDirectory

PORT = 8420


def report(args: Namespace) -> int:
    """Write one page about the given runs."""
    from qfleet.report.run_report import report as write
    from qfleet.runs.directory import RunDirectory

    runs = [RunDirectory.open(word, args.root).path for word in args.words]
    path = write(runs, args.out, args.videos)
    print_result(
        args, [str(path)], {"path": str(path), "runs": [str(run) for run in runs], "bytes": path.stat().st_size}
    )
    return 0


def watch(args: Namespace) -> int:
    """Serve the live page of a run until Ctrl-C."""
    from qfleet.runs.run_state import describe_state, run_state

    run = _named_or_newest(args)
    server = _make_server(args, run)
    state = run_state(run)
    lines = [
        f"{run.path} {describe_state(run, state)}", f"open  {server.url}",
        *(f"or    {url}" for url in server.urls[1:])]
    if args.listen:
        lines.append("anyone with this address can open the page, and nothing is encrypted: across networks use ssh -L")
    lines.append("Ctrl-C stops the page, not the run")
    with server, contextlib.suppress(KeyboardInterrupt):
        print_result(args, lines, {"run": str(run.path), "state": state, "url": server.url})
        if args.open:
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)
    return 0


def _named_or_newest(args: Namespace) -> RunDirectory:
    from qfleet.core.errors import UserError
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.names import run_names
    from qfleet.runs.run_state import run_state

    if args.words:
        return RunDirectory.open(args.words[0], args.root)
    runs = [RunDirectory.open(name, args.root) for name in run_names(args.root)]
    if not runs:
        raise UserError(f"there is no run in {args.root} to watch: start one with `qfleet train`, or set its folder "
                        "with --root DIR")
    return next((run for run in runs if run_state(run) == "running"), runs[0])


def _make_server(args: Namespace, run: RunDirectory) -> LivePageServer:
    """Return a listening server. Other machines have access only with --listen, and never without a token."""
    from qfleet.core.errors import UserError
    from qfleet.report.live_page import LivePageServer
    from qfleet.transport.address import Address, parse_address
    from qfleet.transport.security import fresh_token, read_token

    if args.listen and args.port is not None:
        raise UserError("--listen contains a port already: leave out --port")
    if args.token_file and not args.listen:
        raise UserError("--token-file needs --listen: a page for this machine only needs no token")
    where = parse_address(args.listen, any_port=True) if args.listen else Address("127.0.0.1", PORT)
    if where.path:
        raise UserError(f"--listen {args.listen}: a browser needs HOST:PORT, for example 0.0.0.0:{PORT}")
    token = None if not args.listen else read_token(args.token_file) if args.token_file else fresh_token()
    port = where.port if args.port is None else args.port
    try:
        return LivePageServer(run, where.host, port, token)
    except (OSError, OverflowError) as error:
        if not args.listen and args.port is None:
            return LivePageServer(run, where.host, 0, token)
        raise UserError(f"cannot listen at {Address(where.host, port)} ({getattr(error, 'strerror', None) or error}): "
                        "the port is in use, or the address does not belong to this machine; choose another") from None
