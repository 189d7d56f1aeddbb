"""Who is in a run and who is not: decided purely (membership), written down (journal), told to all (coordinator)."""
