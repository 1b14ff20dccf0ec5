"""How fast this is, beside others and by itself: the same work for everybody, and where a learner's time goes."""

from qfleet.bench.rates import Marks, Rate, machine, rate_of

__all__ = ["Marks", "Rate", "machine", "rate_of"]
