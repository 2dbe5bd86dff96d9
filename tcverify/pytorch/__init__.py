"""PyTorch's own passes and compilers as subjects: `torch:bucket_all_gather`, `torch:compile`, …"""

from tcverify.pytorch.subjects import PREFIX, SUBJECTS, TorchSubject, installed_version, release, subject

__all__ = ["PREFIX", "SUBJECTS", "TorchSubject", "installed_version", "release", "subject"]
