"""Why a finding is one: how values relate to the original's, where they diverge first, and which rewrite is to blame."""
