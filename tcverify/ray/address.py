"""How clusters are named."""

#: The address that stands for a cluster of this machine alone, which ends with the run.
LOCAL = "local"

__all__ = ["LOCAL"]
