"""How much an item verifies, by the name of a profile.

The profiles are also Hypothesis profiles ("tcverify-dev" and so on), for property tests of one's own over the same programs.
Loading another profile, such as the "ci" that Hypothesis loads by itself, changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings

from tcverify.campaign import SETTINGS


@dataclass(frozen=True, slots=True)
class Profile:
    """Items per pass and world, and programs per item."""

    shards: int
    max_examples: int


PROFILES = {
    "dev": Profile(shards=1, max_examples=100),
    "ci": Profile(shards=4, max_examples=150),
    "nightly": Profile(shards=16, max_examples=1000),
}

for _name, _profile in PROFILES.items():
    settings.register_profile(f"tcverify-{_name}", SETTINGS, max_examples=_profile.max_examples)
