"""The exact domain: a prime field, where equal programs agree bit for bit."""
