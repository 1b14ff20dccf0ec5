"""The command line: one module per group of commands, each of which parses, calls the API and prints.

A command takes parsed arguments and returns an exit code. The library is imported inside the commands, so that `qfleet
--help` is instant and works without torch.
"""
