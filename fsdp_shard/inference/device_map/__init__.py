"""Assigning blocks to devices."""
