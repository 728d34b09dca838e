"""Adapters of peft: what their files must say, and the model that they make of a base."""
