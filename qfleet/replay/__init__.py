"""Experience replay: layout, chunks, stores, priorities, rate limiter."""
