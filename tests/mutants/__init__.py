"""Passes with one planted defect each: a harness that does not refute them is not worth its run time."""
