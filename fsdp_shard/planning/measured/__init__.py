"""Compares a plan with its run's measurements."""
