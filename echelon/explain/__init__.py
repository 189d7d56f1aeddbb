"""`echelon plan`: what a run would do, before it is paid for."""
