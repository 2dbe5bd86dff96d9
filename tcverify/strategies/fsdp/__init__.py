"""FSDP programs."""
