"""Bytes on disk: files opened safely, atomic writes, safetensors headers, dtypes."""
