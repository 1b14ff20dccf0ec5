"""Child processes: handles, heartbeats, supervision, signals."""
