"""Settings that would fit: what could be changed, a search by what it costs, and what is said about it."""
