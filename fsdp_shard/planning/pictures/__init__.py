"""Pictures of a plan: a timeline of a step, and a treemap of units, as PNG and in a page."""
