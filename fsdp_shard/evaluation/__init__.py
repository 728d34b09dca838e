"""Figures that say how good a model is."""
