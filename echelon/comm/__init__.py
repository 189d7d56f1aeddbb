"""How ranks meet: the Group contract and what stands behind it, and the store through which groups find each other."""
