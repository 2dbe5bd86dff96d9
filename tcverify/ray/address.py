"""How clusters are named."""

#: The address of a new cluster on this machine only, which ends with the run.
LOCAL = "local"

__all__ = ["LOCAL"]
