"""One pass on one program: evidence is gathered, checks judge it, and a verdict comes out."""
