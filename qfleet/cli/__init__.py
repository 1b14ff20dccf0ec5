"""Command line: one module per group of commands, which call the API and print the results.

A command takes parsed arguments and returns an exit code. The library is imported inside the commands, so that `qfleet
--help` is fast and works without torch.
"""
