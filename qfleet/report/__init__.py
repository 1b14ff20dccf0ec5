"""What people see of a run: progress, status, plots, reports, videos, the live page."""
