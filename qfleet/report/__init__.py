"""Presentation of runs: progress, status, plots, reports, videos and the live page."""
