"""Programs with asynchronous functional collectives."""
