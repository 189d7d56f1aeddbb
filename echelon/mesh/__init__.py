"""Which rank stands where: axes of a mesh, and the spans of parameters that lie on a rank."""
