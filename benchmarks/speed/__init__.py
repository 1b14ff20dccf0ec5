"""Throughput of qfleet and of other libraries at equal work, and the profile of one update."""

from speed.machine import describe_machine
from speed.throughput import Throughput, ThroughputMeter, run_throughput

__all__ = ["Throughput", "ThroughputMeter", "describe_machine", "run_throughput"]
