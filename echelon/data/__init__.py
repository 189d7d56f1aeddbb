"""Global order, dealing, and loaders that can rewind: which samples a rank sees, and that none is lost or used twice."""
