"""Settings that would fit: possible changes, a search by their costs, and reports."""
