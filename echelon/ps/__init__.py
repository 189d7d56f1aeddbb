"""The parameter server: who holds what (keys), how updates meet (policy and its kinds), what makes a step whole (versions)."""
